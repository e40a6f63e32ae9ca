// SPDX-License-Identifier: Apache-2.0
//! What steps of any mixture of sequences take on one copy of a model, from a few prices that are made once: a step's rows,
//! its outputs, and how far back its rows look.

use spanker_topology::Seconds;

use crate::cost::Pricer;
use crate::cost::pass::Pass;
use crate::plan::Plan;
use crate::program::{Reach, Step};

/// Positions at which attention is priced, as far as there is room for them.
const FAR: u64 = 1024;
/// Rows of a piece of a prompt with which attention of several rows is priced.
const SEVERAL: u64 = 16;

/// A time over a number of rows, which is a line between two of them.
type Line = Vec<(u64, f64)>;

/// What steps take.
///
/// ```
/// use spanker_model::{Quant, builtin};
/// use spanker_plan::{Layout, Objective, Part, Plan, Request, Split, Step, StepPrices, Want};
/// use spanker_topology::{Cluster, Profile, Shape};
///
/// let model = builtin("smollm2-135m", Quant::Q4_0)?;
/// let cluster = Cluster::uniform(Profile::builtin("rev-a")?, 1, Shape::Ring)?;
/// let layout = Layout::of_groups(&model, Split::Gather, &[vec![(0, 1.0)]])?;
/// let request = Request { sequences: 4, ..Request::new(Objective::Throughput) };
/// let plan = Plan::new(model, cluster, request, layout)?;
/// let prices = StepPrices::new(&plan);
/// let token = Part::new(&[1], 100, &[0, 1], Want::Best(1));
/// let (one, four) = ([token], [token; 4]);
/// let [one, four] = [&one[..], &four].map(|parts| prices.step(&Step::of(parts)).0);
/// // Weights are read once for all of them.
/// assert!(one < four && four < 4.0 * one);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct StepPrices {
    stages: Vec<StagePrices>,
    /// The head, for so many outputs: the last stage's.
    outputs: Line,
    /// A word from the host, and the result's way back.
    host: f64,
}

/// What a stage takes of a step.
#[derive(Debug, Clone, PartialEq)]
struct StagePrices {
    /// Without attention and head, for so many rows.
    rows: Line,
    /// A position that a row sees which is alone in its sequence, one of several, and one of many that are alone.
    seen: [f64; 3],
    /// What rows that are alone in so many sequences take more than as many of one sequence.
    alone: Line,
}

impl StagePrices {
    fn time(&self, rows: u64, reach: &Reach) -> f64 {
        let seen = [reach.by_single, reach.by_several].map(|seen| seen as f64);
        let (single, more) = match reach.singles {
            0 | 1 => (self.seen[0], 0.0),
            many => (self.seen[2], at(&self.alone, many)),
        };
        at(&self.rows, rows) + more + seen[0] * single + seen[1] * self.seen[1]
    }
}

impl StepPrices {
    /// The prices of a plan's first copy of the model.
    #[must_use]
    pub fn new(plan: &Plan) -> StepPrices {
        let stages = &plan.layout.replicas[0];
        let pricer = Pricer::new(&plan.model, &plan.cluster, &plan.request).exactly();
        let (batch, sequences) = (plan.request.batch, plan.request.sequences);
        let far = FAR.min(plan.request.context - 1);
        let several = SEVERAL.min(batch.max(1));
        let priced = |index: usize| {
            let stage = &stages[index];
            let pass = |pass: Pass| {
                let ends = (index == 0, false);
                let terms = pricer.stage(stage.layers.clone(), &stage.group, pass, ends);
                let from = index.checked_sub(1).map(|before| &stages[before].group.cards);
                let hop = from.map(|from| pricer.hop(from, &stage.group.cards, pass.rows()));
                terms.total().0 + hop.map_or(0.0, |hop| hop.0)
            };
            let slope = |sequences: u64, tokens: u64| {
                let [far_off, near] = [far, 0].map(|past| pass(Pass { sequences, tokens, past }));
                match far {
                    0 => 0.0,
                    far => ((far_off - near) / (sequences * tokens * far) as f64).max(0.0),
                }
            };
            let many = SEVERAL.min(sequences.max(1));
            let seen = [slope(1, 1), slope(1, several), slope(many, 1)];
            let row = |tokens: u64| {
                let attention = seen[usize::from(tokens > 1)] * (tokens * (tokens + 1) / 2) as f64;
                let all = pass(Pass { sequences: 1, tokens, past: 0 });
                (tokens, (all - attention).max(0.0))
            };
            let rows: Line = grid(batch.max(sequences)).into_iter().map(row).collect();
            let more = |sequences: u64| {
                let all = pass(Pass { sequences, tokens: 1, past: 0 });
                (sequences, all - seen[2] * sequences as f64 - at(&rows, sequences))
            };
            let alone = grid(sequences).into_iter().map(more).collect();
            StagePrices { rows, seen, alone }
        };
        let (first, last) = (&stages[0].group, &stages[stages.len() - 1].group);
        let head = |count: u64| (count, pricer.head(last, count).total().0);
        StepPrices {
            stages: (0..stages.len()).map(priced).collect(),
            outputs: grid(plan.request.outputs_for(sequences)).into_iter().map(head).collect(),
            host: pricer.host(&first.cards, &last.cards, true).total().0,
        }
    }

    /// The same where each output takes so much longer, whatever becomes of it.
    #[must_use]
    pub fn with_each_output(mut self, more: Seconds) -> StepPrices {
        self.outputs.iter_mut().for_each(|(count, time)| *time += *count as f64 * more.0);
        self
    }

    /// What a step takes from the host to the host.
    #[must_use]
    pub fn step(&self, step: &Step<'_>) -> Seconds {
        self.time(step.rows(), step.outputs(), &step.reach())
    }

    /// The same for a step of so many rows and outputs that looks so far back.
    #[must_use]
    pub fn time(&self, rows: u64, outputs: u64, reach: &Reach) -> Seconds {
        let stages = self.stages.iter().map(|stage| stage.time(rows, reach)).sum::<f64>();
        Seconds(stages + self.head(outputs) + self.host)
    }

    /// How long a step keeps the next one waiting, where each stage has a step under way.
    #[must_use]
    pub fn pace(&self, rows: u64, outputs: u64, reach: &Reach) -> Seconds {
        let last = self.stages.len() - 1;
        if last == 0 {
            return self.time(rows, outputs, reach);
        }
        let stage = |(at, stage): (usize, &StagePrices)| {
            let head = if at == last { self.head(outputs) } else { 0.0 };
            stage.time(rows, reach) + head
        };
        Seconds(self.stages.iter().enumerate().map(stage).fold(0.0, f64::max))
    }

    fn head(&self, outputs: u64) -> f64 {
        if outputs == 0 { 0.0 } else { at(&self.outputs, outputs) }
    }
}

/// Numbers up to a most that are priced: others lie between two of them.
fn grid(most: u64) -> Vec<u64> {
    let mut list: Vec<u64> = Vec::new();
    let mut next = 1;
    while next < most {
        list.push(next);
        next = if next < 4 { next + 1 } else { next * 2 };
    }
    list.push(most.max(1));
    list
}

/// The time at a number of rows; beyond the last one as the last two go on.
fn at(line: &Line, rows: u64) -> f64 {
    let above = line.partition_point(|(known, _)| *known < rows);
    match (above.checked_sub(1), line.get(above)) {
        (_, Some(&(known, time))) if known == rows => time,
        (None, Some(&(_, time))) => time,
        (Some(below), Some(&next)) => between(line[below], next, rows),
        (Some(last), None) => match last.checked_sub(1) {
            Some(before) => between(line[before], line[last], rows),
            None => line[last].1 * rows as f64 / line[last].0 as f64,
        },
        (None, None) => 0.0,
    }
}

fn between((one, low): (u64, f64), (other, high): (u64, f64), rows: u64) -> f64 {
    low + (high - low) * (rows as f64 - one as f64) / (other - one) as f64
}

#[cfg(test)]
mod tests {
    use spanker_model::{KvShape, Quant, builtin};
    use spanker_topology::{Cluster, OperatorKind, OperatorRate, Profile, Shape};

    use super::*;
    use crate::{Conditions, Layout, Objective, Part, Request, Split, Want, simulate};

    fn plan(groups: &[Vec<(usize, f64)>], sequences: u64, position: u64) -> Plan {
        plan_on(Profile::builtin("rev-a").unwrap(), groups, sequences, position)
    }

    fn plan_on(card: Profile, groups: &[Vec<(usize, f64)>], sequences: u64, position: u64) -> Plan {
        let model = builtin("smollm2-135m", Quant::Q4_0).unwrap();
        let cards = groups.iter().flatten().count();
        let cluster = Cluster::uniform(card, cards, Shape::Ring).unwrap();
        let layout = Layout::of_groups(&model, Split::Gather, groups).unwrap();
        let objective = Objective::Throughput;
        let request = Request { sequences, position, batch: 64, ..Request::new(objective) };
        Plan::new(model, cluster, request, layout).unwrap()
    }

    /// A card on which attention was measured: of one sequence, and of many with a start for each.
    fn measured() -> Profile {
        let mut card = Profile::builtin("rev-a").unwrap();
        let entry = |kind, rows: u64, each: f64| {
            let overhead = Seconds(rows as f64 * each);
            OperatorRate { kind, weights: None, rows, overhead, rate: 20e9 }
        };
        let counts = [1, 2, 4, 8, 16];
        let (one, many) = (OperatorKind::Attention, OperatorKind::ManyAttention);
        card.compute.operators.extend(counts.map(|rows| entry(one, rows, 1e-6)));
        card.compute.operators.extend(counts[1..].iter().map(|&rows| entry(many, rows, 9e-6)));
        card
    }

    #[test]
    fn sequences_of_one_row_each_cost_what_was_measured_of_as_many() {
        let groups = [vec![(0, 1.0)]];
        let with = plan_on(measured(), &groups, 40, 300);
        let mut less = measured();
        less.compute.operators.retain(|entry| entry.kind != OperatorKind::ManyAttention);
        let without = plan_on(less, &groups, 40, 300);
        let time = |plan: &Plan, sequences: u64| {
            let reach = Reach::of((0..sequences).map(|_| (1, 300)));
            StepPrices::new(plan).time(sequences, sequences, &reach).0
        };
        let layers = with.model.layers.len() as f64;
        for sequences in [2, 3, 16, 40] {
            // All that differs are the starts, beyond the measured numbers, too.
            let more = layers * (9e-6 * sequences as f64 - 1e-6);
            let found = time(&with, sequences) - time(&without, sequences);
            assert!((found / more - 1.0).abs() < 0.01, "{sequences}: {found} {more}");
            let plan = plan_on(measured(), &groups, sequences, 300);
            let predicted = sequences as f64 / plan.predict().tokens_per_second;
            assert!((time(&with, sequences) / predicted - 1.0).abs() < 0.02, "{sequences}");
        }
    }

    #[test]
    fn what_becomes_of_an_output_can_cost_something() {
        let prices = StepPrices::new(&plan(&[vec![(0, 1.0)]], 16, 100));
        let more = prices.clone().with_each_output(Seconds(1e-4));
        let reach = Reach::of((0..5).map(|_| (1, 100)));
        let found = more.time(9, 5, &reach).0 - prices.time(9, 5, &reach).0;
        assert!((found - 5e-4).abs() < 1e-9, "{found}");
        assert!((more.time(9, 0, &reach).0 - prices.time(9, 0, &reach).0).abs() < 1e-12);
    }

    #[test]
    fn steps_between_priced_ones_take_what_predictions_and_simulations_say() {
        let together: Vec<(usize, f64)> = (0..3).map(|card| (card, 1.0)).collect();
        for groups in [vec![vec![(0, 1.0)]], vec![together]] {
            for (sequences, position) in [(1, 0), (3, 700), (7, 40), (16, 300)] {
                let plan = plan(&groups, sequences, position);
                let prices = StepPrices::new(&plan);
                let blocks = vec![0; KvShape::blocks_for(position + 1) as usize];
                let part = Part::new(&[0], position, &blocks, Want::Best(1));
                let ours = prices.step(&Step::of(&vec![part; sequences as usize])).0;
                let predicted = sequences as f64 / plan.predict().tokens_per_second;
                assert!((ours / predicted - 1.0).abs() < 0.02, "{ours} {predicted}");
                let trace = simulate(&plan, &Conditions::calm(3)).unwrap();
                let simulated = (trace.tokens[2] - trace.tokens[0]) / 2.0;
                assert!((ours / simulated - 1.0).abs() < 0.02, "{ours} {simulated}");
            }
        }
    }

    #[test]
    fn a_pipeline_with_a_step_in_each_stage_goes_at_the_pace_of_its_longest_one() {
        let groups: Vec<Vec<(usize, f64)>> = (0..3).map(|card| vec![(card, 1.0)]).collect();
        let plan = plan(&groups, 12, 200);
        let prices = StepPrices::new(&plan);
        let (rows, reach) = (4, Reach::of((0..4).map(|_| (1, 200))));
        let (whole, pace) = (prices.time(rows, rows, &reach).0, prices.pace(rows, rows, &reach).0);
        assert!(pace < 0.6 * whole && pace > whole / 3.5, "{pace} of {whole}");
        let predicted = rows as f64 / plan.predict().tokens_per_second;
        assert!((pace / predicted - 1.0).abs() < 0.1, "{pace} {predicted}");
    }
}
