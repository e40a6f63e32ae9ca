// SPDX-License-Identifier: Apache-2.0
//! From the times of instructions to the costs of kinds of operators. Pure: nothing is measured here.
//!
//! An instruction may do several operators: a norm, the rounding of its results and the products that use them are one. The
//! time of an instruction is attributed to the operators of its chief kind, and the others that it does cost nothing. So
//! the sum over a program's operators is the sum over its instructions, which is what a prediction adds up.

use spanker_model::Quant;
use spanker_plan::Load;
use spanker_topology::{OperatorKind, OperatorRate, Seconds};

/// An instruction that was timed, in a step of so many rows.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Timed {
    pub(super) rows: u64,
    /// What its operators count for.
    pub(super) loads: Vec<Load>,
    pub(super) seconds: f64,
}

/// Units in a second of what has no cost of its own.
const AT_ONCE: f64 = 1e18;
/// Rounds of the solver: it has a few unknowns.
const ROUNDS: usize = 20_000;

/// A kind of operator, and the type of its weights.
type Key = (OperatorKind, Option<Quant>);

/// To which kind of its operators an instruction's time belongs: the first of these that it has.
const CHIEF: [OperatorKind; 10] = [
    OperatorKind::Product,
    OperatorKind::Attention,
    OperatorKind::Embed,
    OperatorKind::Norm,
    OperatorKind::Quantize,
    OperatorKind::Rotate,
    OperatorKind::Gate,
    OperatorKind::Cache,
    OperatorKind::Add,
    OperatorKind::Copy,
];

/// Kinds whose operators do not say how many rows they have.
fn is_rowless(kind: OperatorKind) -> bool {
    use OperatorKind::{Add, Cache, Copy, Gate};
    matches!(kind, Add | Cache | Gate | Copy)
}

fn key(load: &Load) -> Key {
    (load.kind, load.weights)
}

impl Timed {
    fn chief(&self) -> Option<OperatorKind> {
        CHIEF.into_iter().find(|&kind| self.loads.iter().any(|load| load.kind == kind))
    }

    /// Whether its time belongs to attention.
    pub(super) fn is_attention(&self) -> bool {
        self.chief() == Some(OperatorKind::Attention)
    }

    /// The operators to which its time belongs.
    fn charged(&self) -> impl Iterator<Item = &Load> {
        let chief = self.chief();
        self.loads.iter().filter(move |load| Some(load.kind) == chief)
    }
}

/// Moves the extra time of instructions, compared with the same step after fewer tokens, to the attention before them:
/// nothing else depends on the number of tokens, but blocks that were done with their heads wait for the others at the
/// beginning of the next instruction.
pub(super) fn charge_attention(fewer: &[Timed], instructions: &mut [Timed]) {
    let mut attention: Option<usize> = None;
    for at in 0..instructions.len().min(fewer.len()) {
        if instructions[at].is_attention() {
            attention = Some(at);
        } else if let Some(attention) = attention {
            let longer = instructions[at].seconds - fewer[at].seconds;
            instructions[at].seconds -= longer;
            instructions[attention].seconds += longer;
        }
    }
}

/// Numbers, none of them negative, with which the columns come nearest to the times.
fn solve(rows: &[Vec<f64>], times: &[f64]) -> Vec<f64> {
    let count = rows.first().map_or(0, Vec::len);
    let largest = |at: usize| rows.iter().map(|row| row[at]).fold(f64::MIN_POSITIVE, f64::max);
    let scale: Vec<f64> = (0..count).map(largest).collect();
    let dot = |one: usize, two: usize| {
        rows.iter().map(|row| row[one] / scale[one] * (row[two] / scale[two])).sum::<f64>()
    };
    let products: Vec<Vec<f64>> =
        (0..count).map(|one| (0..count).map(|two| dot(one, two)).collect()).collect();
    let target = |at: usize| {
        rows.iter().zip(times).map(|(row, time)| row[at] / scale[at] * time).sum::<f64>()
    };
    let targets: Vec<f64> = (0..count).map(target).collect();
    let mut found = vec![0.0; count];
    for _ in 0..ROUNDS {
        let mut moved = 0.0f64;
        for at in 0..count {
            if products[at][at] <= 0.0 {
                continue;
            }
            let others: f64 = (0..count).map(|other| products[at][other] * found[other]).sum();
            let next = (found[at] + (targets[at] - others) / products[at][at]).max(0.0);
            moved = moved.max((next - found[at]).abs());
            found[at] = next;
        }
        if moved < 1e-15 {
            break;
        }
    }
    found.iter().zip(&scale).map(|(found, scale)| found / scale).collect()
}

/// The cost of operators of one kind: a start, and a unit.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Cost {
    start: f64,
    unit: f64,
}

/// The costs of operators of the chief kind of these instructions, by type of weights.
fn cost(instructions: &[&Timed]) -> Vec<(Key, Cost)> {
    let mut keys: Vec<Key> = Vec::new();
    for load in instructions.iter().flat_map(|instruction| instruction.charged()) {
        if !keys.contains(&key(load)) {
            keys.push(key(load));
        }
    }
    let columns = |instruction: &&Timed| {
        let mut row = vec![0.0; 2 * keys.len()];
        for load in instruction.charged() {
            let at = keys.iter().position(|known| *known == key(load)).unwrap_or(0);
            let starts = load.starts || load.kind != OperatorKind::Product;
            row[2 * at] += f64::from(u8::from(starts));
            row[2 * at + 1] += load.units as f64;
        }
        row
    };
    let rows: Vec<Vec<f64>> = instructions.iter().map(columns).collect();
    let times: Vec<f64> = instructions.iter().map(|instruction| instruction.seconds).collect();
    let found = solve(&rows, &times);
    // Together they cost what was measured, however well instructions can be distinguished.
    let by = |row: &Vec<f64>| row.iter().zip(&found).map(|(a, x)| a * x).sum::<f64>();
    let (sum, measured) = (rows.iter().map(by).sum::<f64>(), times.iter().sum::<f64>());
    let factor = if sum > 0.0 { measured / sum } else { 1.0 };
    let pairs =
        found.chunks_exact(2).map(|pair| Cost { start: pair[0] * factor, unit: pair[1] * factor });
    keys.into_iter().zip(pairs).collect()
}

fn entry((kind, weights): Key, rows: u64, cost: Cost) -> OperatorRate {
    let weights = weights.map(|quant| quant.to_string());
    let rate = (1.0 / cost.unit.max(1.0 / AT_ONCE)).min(AT_ONCE);
    OperatorRate { kind, weights, rows, overhead: Seconds(cost.start), rate }
}

/// The cost of every kind of operator, by instructions of steps of several numbers of rows.
pub(super) fn operators(instructions: &[Timed]) -> Vec<OperatorRate> {
    let mut all: Vec<u64> = instructions.iter().map(|instruction| instruction.rows).collect();
    all.sort_unstable();
    all.dedup();
    let mut entries = Vec::new();
    // These count by size alone: the rest of their instructions' time goes to the norms of the same step.
    let mut sizes: Vec<(OperatorKind, Cost)> = Vec::new();
    for kind in CHIEF.into_iter().filter(|&kind| is_rowless(kind)) {
        let own: Vec<&Timed> =
            instructions.iter().filter(|instruction| instruction.chief() == Some(kind)).collect();
        let found = cost(&own).first().map_or(Cost::default(), |(_, cost)| *cost);
        sizes.push((kind, found));
        entries.push(entry((kind, None), 1, Cost { start: 0.0, ..found }));
    }
    for &rows in &all {
        let own: Vec<&Timed> =
            instructions.iter().filter(|instruction| instruction.rows == rows).collect();
        entries.extend(of_rows(rows, &own, &sizes));
    }
    // Attention of many sequences is priced by that of one.
    for kind in OperatorKind::ALL.into_iter().filter(|&kind| kind != OperatorKind::ManyAttention) {
        if entries.iter().all(|entry: &OperatorRate| entry.kind != kind) {
            entries.push(entry((kind, None), 1, Cost::default()));
        }
    }
    entries.sort_by(|a, b| (a.kind, &a.weights, a.rows).cmp(&(b.kind, &b.weights, b.rows)));
    entries
}

/// Entries for one number of rows.
fn of_rows(
    rows: u64,
    instructions: &[&Timed],
    sizes: &[(OperatorKind, Cost)],
) -> Vec<OperatorRate> {
    let mut found: Vec<(Key, Cost)> = Vec::new();
    for kind in CHIEF.into_iter().filter(|&kind| !is_rowless(kind)) {
        let own: Vec<&Timed> = instructions
            .iter()
            .copied()
            .filter(|instruction| instruction.chief() == Some(kind))
            .collect();
        found.extend(cost(&own));
    }
    // What others do on the way takes nothing.
    for load in instructions.iter().flat_map(|instruction| &instruction.loads) {
        if !is_rowless(load.kind)
            && load.rows == rows
            && !found.iter().any(|(known, _)| *known == key(load))
        {
            found.push((key(load), Cost::default()));
        }
    }
    let beside = |instruction: &&&Timed| match instruction.chief() {
        None => instruction.seconds,
        Some(kind) => {
            let start = sizes.iter().find(|(known, _)| *known == kind).map_or(0.0, |s| s.1.start);
            start * instruction.charged().count() as f64
        }
    };
    let norms = instructions.iter().flat_map(|instruction| &instruction.loads);
    let norms = norms.filter(|load| load.kind == OperatorKind::Norm && load.rows == rows).count();
    let beside: f64 = instructions.iter().map(|instruction| beside(&instruction)).sum();
    if let Some((_, norm)) = found.iter_mut().find(|((kind, _), _)| *kind == OperatorKind::Norm) {
        norm.start += beside / norms.max(1) as f64;
    }
    found.into_iter().map(|(key, cost)| entry(key, rows, cost)).collect()
}

/// An exchange that was timed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TimedExchange {
    /// Rows of the step.
    pub(super) rows: u64,
    /// Whether it came from another stage.
    pub(super) hop: bool,
    /// Bytes of what everybody has afterwards.
    pub(super) bytes: u64,
    pub(super) seconds: f64,
}

/// The cost of an exchange: a start, and a byte. A token is little more than starts, so these are those of steps of one
/// row, where there are any; bytes are what makes larger ones take longer, each as important as any other.
pub(super) fn exchange(samples: &[TimedExchange]) -> (f64, f64) {
    // Messages between stages overlap: they count where groups exchange nothing.
    let only_hops = samples.iter().all(|exchange| exchange.hop);
    let is_usable =
        |exchange: &&TimedExchange| exchange.seconds > 0.0 && (only_hops || !exchange.hop);
    let usable: Vec<&TimedExchange> = samples.iter().filter(is_usable).collect();
    let columns = |exchange: &&TimedExchange| {
        vec![1.0 / exchange.seconds, exchange.bytes as f64 / exchange.seconds]
    };
    let rows: Vec<Vec<f64>> = usable.iter().map(columns).collect();
    let [start, byte] = solve(&rows, &vec![1.0; rows.len()])[..] else { return (0.0, 0.0) };
    let tokens: Vec<&&TimedExchange> =
        usable.iter().filter(|exchange| exchange.rows == 1).collect();
    if tokens.is_empty() {
        return (start, byte);
    }
    let rest = |exchange: &&&TimedExchange| exchange.seconds - byte * exchange.bytes as f64;
    let start = (tokens.iter().map(rest).sum::<f64>() / tokens.len() as f64).max(0.0);
    let rows: Vec<Vec<f64>> =
        usable.iter().map(|exchange| vec![exchange.bytes as f64 / exchange.seconds]).collect();
    let rest: Vec<f64> = usable.iter().map(|exchange| 1.0 - start / exchange.seconds).collect();
    (start, solve(&rows, &rest).first().copied().unwrap_or(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(kind: OperatorKind, rows: u64, units: u64) -> Load {
        let weights = (kind == OperatorKind::Product).then_some(Quant::Q4_0);
        let (single_units, singles, starts) = (0, 0, true);
        Load { kind, weights, rows, bytes: units, macs: 0, units, single_units, singles, starts }
    }

    fn instruction(rows: u64, loads: &[Load], seconds: f64) -> Timed {
        Timed { rows, loads: loads.to_vec(), seconds }
    }

    /// What the operators of instructions cost together, by a table.
    fn priced(entries: &[OperatorRate], instructions: &[Timed]) -> f64 {
        let time = |load: &Load| {
            let name = load.weights.map(|quant| quant.to_string());
            let own: Vec<OperatorRate> = entries
                .iter()
                .filter(|entry| entry.kind == load.kind && entry.weights == name)
                .cloned()
                .collect();
            let whole =
                spanker_topology::operator_time(&own, load.rows, load.units as f64).unwrap();
            let empty = spanker_topology::operator_time(&own, load.rows, 0.0).unwrap();
            if load.starts || load.kind != OperatorKind::Product { whole } else { whole - empty }
        };
        instructions.iter().flat_map(|instruction| &instruction.loads).map(time).sum()
    }

    fn layer(rows: u64) -> Vec<Timed> {
        use OperatorKind::{Add, Attention, Norm, Product, Quantize};
        let scale = rows as f64;
        let mut follows = load(Product, rows, 3_000_000);
        follows.starts = false;
        let mut instructions = vec![
            instruction(
                rows,
                &[load(Product, rows, 9_000_000), follows],
                2e-6 + 12e6 / 4e12 * scale,
            ),
            instruction(rows, &[load(Attention, rows, 1_000_000)], 3e-6 * scale),
            instruction(rows, &[load(Attention, rows, 9_000_000)], 7e-6 * scale),
            instruction(rows, &[load(Product, rows, 24_000_000)], 2e-6 + 24e6 / 4e12 * scale),
        ];
        if rows == 1 {
            instructions[0].loads.extend([load(Norm, 1, 100), load(Quantize, 1, 100)]);
        } else {
            instructions.push(instruction(rows, &[load(Norm, rows, 100 * rows)], 2.5e-6));
            instructions.push(instruction(rows, &[load(Quantize, rows, 100 * rows)], 2.5e-6));
            instructions.push(instruction(
                rows,
                &[load(Add, 1, 4_000 * rows)],
                2.5e-6 + 4e3 * scale / 1e12,
            ));
        }
        instructions
    }

    #[test]
    fn operators_of_a_step_cost_together_what_its_instructions_took() {
        let instructions: Vec<Timed> = [1, 2, 16, 128].into_iter().flat_map(layer).collect();
        let entries = operators(&instructions);
        for rows in [1, 2, 16, 128] {
            let own: Vec<Timed> = instructions
                .iter()
                .filter(|instruction| instruction.rows == rows)
                .cloned()
                .collect();
            let measured: f64 = own.iter().map(|instruction| instruction.seconds).sum();
            let priced = priced(&entries, &own);
            assert!((priced / measured - 1.0).abs() < 0.01, "{rows}: {priced} of {measured}");
        }
    }

    #[test]
    fn a_norm_within_a_product_costs_nothing_and_one_by_itself_its_instruction() {
        let instructions: Vec<Timed> = [1, 16].into_iter().flat_map(layer).collect();
        let entries = operators(&instructions);
        let norm = |rows: u64| {
            let is = |e: &&OperatorRate| e.kind == OperatorKind::Norm && e.rows == rows;
            entries.iter().find(is).unwrap().time(100.0)
        };
        assert!(norm(1) < 1e-9, "{}", norm(1));
        // With the start of the sum, which does not say how many rows it has.
        assert!((4e-6..6e-6).contains(&norm(16)), "{}", norm(16));
    }

    #[test]
    fn what_products_wait_for_heads_with_more_positions_is_attention() {
        use OperatorKind::{Attention, Product};
        let step = |past: u64, attention: f64, waiting: f64| {
            vec![
                instruction(1, &[load(Product, 1, 9_000_000)], 5e-6),
                instruction(1, &[load(Attention, 1, 1000 * past)], attention),
                instruction(1, &[load(Product, 1, 9_000_000)], 5e-6 + waiting),
            ]
        };
        let few = step(16, 4e-6, 0.0);
        let mut many = step(2048, 20e-6, 15e-6);
        charge_attention(&few, &mut many);
        let seconds: Vec<f64> = many.iter().map(|instruction| instruction.seconds).collect();
        assert!((seconds[1] - 35e-6).abs() < 1e-12 && (seconds[2] - 5e-6).abs() < 1e-12);
        let entries = operators(&[few.clone(), many.clone()].concat());
        for (own, measured) in [(few, 14e-6), (many, 45e-6)] {
            let priced = priced(&entries, &own);
            assert!((priced / measured - 1.0).abs() < 0.02, "{priced} of {measured}");
        }
    }

    #[test]
    fn every_kind_has_an_entry_and_rows_ascend() {
        let entries = operators(&layer(1));
        for kind in OperatorKind::ALL {
            let known = entries.iter().any(|entry| entry.kind == kind);
            assert_eq!(known, kind != OperatorKind::ManyAttention, "{}", kind.name());
        }
        // Sequences far back are not free because nobody has measured many of them.
        let mut card = spanker_topology::Profile::builtin("rev-a").unwrap();
        card.compute.operators = entries;
        let cost = spanker_plan::Cost::of(&card);
        let time = |kind: OperatorKind, rows: u64, units: u64| {
            cost.operator(&Load { singles: rows, ..load(kind, rows, units) }).total().0
        };
        let one = time(OperatorKind::Attention, 1, 100_000_000);
        let two = time(OperatorKind::ManyAttention, 2, 200_000_000);
        assert!(two > 1.5 * one && two < 2.5 * one, "{one} {two}");
        let both: Vec<Timed> = [layer(16), layer(1)].concat();
        let rows: Vec<u64> = operators(&both)
            .iter()
            .filter(|entry| entry.kind == OperatorKind::Attention)
            .map(|entry| entry.rows)
            .collect();
        assert_eq!(rows, [1, 16]);
    }

    #[test]
    fn an_exchange_is_a_start_and_bytes() {
        let timed = |rows: u64, bytes: u64, more: f64| TimedExchange {
            rows,
            hop: false,
            bytes,
            seconds: 5e-5 + bytes as f64 * 2e-10 + more,
        };
        let sizes = [2048, 16384, 131_072, 1 << 20];
        let samples = sizes.map(|bytes| timed(bytes / 2048, bytes, 0.0));
        let (start, byte) = exchange(&samples);
        assert!((start - 5e-5).abs() < 1e-7 && (byte - 2e-10).abs() < 1e-12, "{start} {byte}");
        // Half of a message that came while nobody looked says nothing.
        let hop = TimedExchange { hop: true, seconds: 1e-5, ..timed(512, 1 << 20, 0.0) };
        assert_eq!(exchange(&[&samples[..], &[hop]].concat()), (start, byte));
        // Where large ones have another start, those of tokens keep theirs.
        let samples = sizes
            .map(|bytes| timed(bytes / 2048, bytes, if bytes > 9e4 as u64 { 9e-5 } else { 0.0 }));
        let (start, byte) = exchange(&samples);
        let token = start + byte * 2048.0;
        assert!((token / samples[0].seconds - 1.0).abs() < 0.02, "{token}");
    }
}
