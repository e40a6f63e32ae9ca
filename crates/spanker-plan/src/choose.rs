// SPDX-License-Identifier: Apache-2.0
//! The chooser: every kind of layout that a cluster can form, the best of each kind, best first.
//!
//! Feasibility comes first: a layout that exceeds a card's memory is only reported when nothing fits, as
//! what it would take. Then the objective decides. For up to 16 cards every set of cards, every
//! partition into stages and every division of layers is covered, by bounds or by trying; beyond that, and
//! where the budget of partial choices ends, the search keeps the most promising ones and says so.
//!
//! What is exact: groups are split by gather or reduce, with shares by speed, by speed under the
//! cards' memory, or by memory; where layers differ, layers are divided as if they were equal; the order of
//! more than four stages is improved by swapping. See `docs/adr/0006-chooser.md`.

#[cfg(test)]
mod oracle;
pub(crate) mod pool;
mod replicas;
pub(crate) mod search;
pub(crate) mod split;
#[cfg(test)]
mod uniform;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::rc::Rc;

use spanker_model::Model;
use spanker_topology::Cluster;

use crate::cost::pass::{Pass, Passes};
use crate::cost::{Group, Pricer};
use crate::plan::{Candidate, Layout, Prediction, Strategy, in_flight};
use crate::predict::{fits, predict, scored};
use crate::{Objective, PlanError, Request};
use pool::{Classes, Entry};
use search::{Found, Goal, Limits, Search};
use split::Score;

/// The most cards for which every set of cards is considered.
pub const EXACT_CARDS: usize = 16;

/// The most equal cards of which every number is considered; timing collectives between more takes longer
/// than the difference of a card or two is worth.
const EQUAL_CARDS: usize = 64;

/// Partial choices that all searches for one request may look at together.
const NODES: u64 = 8_000;

/// Partial choices that every search may look at, even when that many are used up.
const FEW_NODES: u64 = 200;

/// Choices of each size that a beam keeps.
const WIDTH: usize = 48;

/// The most sets of cards that are all considered where several searches are needed: ten different cards.
const MANY_SETS: usize = 1024;

/// A part of the cards with so many times fewer sets of cards has groups of its own.
const FEW_SETS: usize = 4;

/// How many times as long as the best a layout of large groups may take to be simulated.
const FAR: f64 = 1.25;

/// The most different sets of cards for which replicas are divided in every way.
const REPLICA_SETS: usize = 64;

/// What the chooser found.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The best layout of each kind, best first; those that do not fit come last.
    pub candidates: Vec<Candidate>,
    /// Whether nothing better exists among the layouts that are considered.
    pub exact: bool,
}

impl Choice {
    /// The best layout that fits.
    #[must_use]
    pub fn best(&self) -> Option<&Candidate> {
        self.candidates.first().filter(|best| best.prediction.fits())
    }

    /// The best layout that fits and that a runner takes.
    #[must_use]
    pub fn best_to_run(&self) -> Option<&Candidate> {
        let runs = |candidate: &&Candidate| {
            candidate.prediction.fits() && candidate.layout.not_runnable().is_none()
        };
        self.candidates.iter().find(runs)
    }

    /// The same without layouts that no runner takes.
    #[must_use]
    pub fn to_run(&self) -> Choice {
        let all = self.candidates.iter().filter(|c| c.layout.not_runnable().is_none());
        Choice { candidates: all.cloned().collect(), exact: self.exact }
    }
}

/// Finds the best layout of each kind on these cards of a cluster.
///
/// ```
/// use spanker_model::{Quant, builtin};
/// use spanker_plan::{Objective, Request, choose};
/// use spanker_topology::{Cluster, Profile, Shape};
/// let model = builtin("tinyllama-1.1b", Quant::Q4_0).unwrap();
/// let ring = Cluster::uniform(Profile::builtin("rev-a")?, 4, Shape::Ring)?;
/// let choice = choose(&model, &ring, &[0, 1, 2, 3], &Request::new(Objective::Latency)).unwrap();
/// let best = choice.best().unwrap();
/// assert_eq!(best.layout.tensor_ways(), 4);
/// assert!((12.9..13.3).contains(&best.prediction.tokens_per_second));
/// # Ok::<(), spanker_topology::TopologyError>(())
/// ```
///
/// # Errors
/// [`PlanError::Request`] for a request that makes no sense or names no cards.
pub fn choose(
    model: &Model,
    cluster: &Cluster,
    cards: &[usize],
    request: &Request,
) -> Result<Choice, PlanError> {
    request.check_for(model).map_err(|what| PlanError::Request { what })?;
    if cards.is_empty() || cards.iter().any(|&card| card >= cluster.cards()) {
        let what = format!("cards {cards:?} are not cards of a cluster of {}", cluster.cards());
        return Err(PlanError::Request { what });
    }
    let pricer = Pricer::new(model, cluster, request);
    let classes = Classes::of(cluster, cards);
    let chooser = Chooser {
        pricer: &pricer,
        classes,
        pools: RefCell::default(),
        nodes_left: Cell::new(NODES),
    };
    let mut exact = true;
    let mut found = Vec::new();
    for family in FAMILIES {
        let fitting = chooser.best_of(family, true, &mut exact);
        // What does not fit is priced all the same, so that one can see what it would take.
        let best = fitting.or_else(|| chooser.best_of(family, false, &mut exact));
        found.extend(best);
    }
    if request.objective == Objective::Throughput {
        found.extend(chooser.replicas(&mut exact));
    }
    let mut found = chooser.candidates(found);
    let rank = |candidate: &Candidate| score(request.objective, &candidate.prediction);
    found.sort_by(|a, b| {
        let fits = b.prediction.fits().cmp(&a.prediction.fits());
        fits.then(rank(a).total_cmp(&rank(b)))
    });
    if request.objective == Objective::Ttft {
        prefer_decoding(&mut found);
    }
    Ok(Choice { candidates: found, exact })
}

/// Of layouts that give the first token equally early, up to half a percent, puts the one first that then
/// decodes fastest.
fn prefer_decoding(candidates: &mut Vec<Candidate>) {
    let Some(first) = candidates.first().map(|best| best.prediction.ttft.0) else { return };
    let as_early = |c: &Candidate| c.prediction.fits() && c.prediction.ttft.0 <= first * 1.005;
    let ties = candidates.iter().enumerate().filter(|(_, candidate)| as_early(candidate));
    let rate = |candidate: &Candidate| candidate.prediction.tokens_per_second;
    let best = ties.max_by(|a, b| rate(a.1).total_cmp(&rate(b.1))).map(|(index, _)| index);
    if let Some(index) = best {
        let candidate = candidates.remove(index);
        candidates.insert(0, candidate);
    }
}

/// Whether the cards can hold the model at all: as one group, as two, or card by card.
pub(crate) fn holds(model: &Model, cluster: &Cluster, cards: &[usize], request: &Request) -> bool {
    use crate::cost::memory::Place;
    use crate::cost::shard::Split;
    let pricer = Pricer::new(model, cluster, request);
    let pass = Pass::decode(request.sequences, request.position);
    let most = |cards: &[usize], first: bool, last: bool| {
        let place = Place { first, last, sequences: request.sequences, turns: 1 };
        let splits: &[Split] =
            if cards.len() == 1 { &[Split::Whole] } else { &[Split::Gather, Split::Reduce] };
        let groups =
            splits.iter().flat_map(|&split| pricer.groups(cards, split, pass, request.sequences));
        groups.map(|group| pricer.capacity(&group, place) as usize).max().unwrap_or(0)
    };
    let (layers, count) = (model.layers.len(), cards.len());
    let one_by_one = || {
        let each = (0..count).map(|i| most(&cards[i..=i], i == 0, i + 1 == count));
        count <= layers && each.sum::<usize>() >= layers
    };
    let in_two = || {
        let sizes = (0..8).map(|doublings| 1usize << doublings).filter(|&size| size < count);
        sizes.flat_map(|size| [size, count - size]).any(|first| {
            most(&cards[..first], true, false) + most(&cards[first..], false, true) >= layers
        })
    };
    most(cards, true, true) >= layers || one_by_one() || in_two()
}

/// What an objective minimises.
pub(crate) fn score(objective: Objective, prediction: &Prediction) -> f64 {
    match objective {
        Objective::Latency => prediction.token.0,
        Objective::Throughput => -prediction.tokens_per_second,
        Objective::Ttft => prediction.ttft.0,
    }
}

/// The kinds of layout with one copy of the model.
const FAMILIES: [Strategy; 5] = [
    Strategy::OneCard,
    Strategy::TensorGather,
    Strategy::TensorReduce,
    Strategy::Pipeline,
    Strategy::TensorPipeline,
];

fn allows(family: Strategy, group: &Group) -> bool {
    use crate::cost::shard::Split;
    match family {
        Strategy::OneCard | Strategy::Pipeline => group.cards.len() == 1,
        Strategy::TensorGather => group.split == Split::Gather,
        Strategy::TensorReduce => group.split == Split::Reduce,
        _ => true,
    }
}

struct Chooser<'a> {
    pricer: &'a Pricer<'a>,
    classes: Classes,
    pools: RefCell<HashMap<PoolKey, SizedPool>>,
    nodes_left: Cell<u64>,
}

/// The most cards of a group in a pool, and the pool.
type SizedPool = (usize, Rc<Vec<Entry>>);

/// Pools that differ: the pass as bits, the sequences, whether memory counts, the cards of each class and whether a
/// group must hold all layers.
type PoolKey = (Vec<[u64; 4]>, u64, bool, Vec<u16>, bool);

/// Which of the cards a copy of the model may use: how many of each class, after how many others.
struct Share {
    available: Vec<u16>,
    before: Vec<usize>,
}

/// One search: what goes through the pipeline at once, and what the stages' times mean.
#[derive(Clone)]
struct Setting {
    passes: Passes,
    score: Score,
    head_in_turn: bool,
    /// How many stages this setting is for, if it is for a certain number.
    stages: Option<usize>,
    /// Sequences whose keys and values the cards keep.
    sequences: u64,
}

/// A layout and what the objective makes of it, by the prices of the search: less is better.
struct Scored {
    layout: Layout,
    score: f64,
}

/// What one search looks for: a family of layouts under a setting, with or without regard to memory, on a part
/// of the cards.
#[derive(Clone, Copy)]
struct Wanted<'w> {
    family: Strategy,
    setting: &'w Setting,
    memory: bool,
    share: &'w Share,
}

impl Chooser<'_> {
    fn cards(&self) -> usize {
        self.classes.members.iter().map(Vec::len).sum()
    }

    fn most_stages(&self) -> usize {
        self.cards().min(self.pricer.model.layers.len())
    }

    /// Whether a number of stages or copies is tried: all for few cards, round ones for many.
    fn tried(&self, count: usize) -> bool {
        self.cards() <= EXACT_CARDS || search::round(count)
    }

    /// What has to be searched for one copy of the model that serves `sequences`.
    fn settings(&self, sequences: u64) -> Vec<Setting> {
        let request = self.pricer.request;
        let decode = |batches: u64, together: u64, stages: Option<usize>| {
            let pass = Pass::decode(together, request.position);
            let score = match request.objective {
                Objective::Throughput => Score::Turns(batches as f64),
                _ => Score::Sum,
            };
            let passes = Passes::from([(pass, 1.0)]);
            Setting { passes, score, head_in_turn: true, stages, sequences }
        };
        match request.objective {
            Objective::Latency => vec![decode(1, sequences, None)],
            Objective::Throughput => {
                let lengths = (1..=self.most_stages()).filter(|&stages| self.tried(stages));
                let setting = |stages: usize| {
                    let (batches, together) = in_flight(request, sequences, stages);
                    decode(batches, together, Some(stages))
                };
                lengths.map(setting).collect()
            }
            Objective::Ttft => {
                let passes = Pass::prefill(sequences, request.prompt, request.batch).into();
                let (score, stages) = (Score::Sum, None);
                vec![Setting { passes, score, head_in_turn: false, stages, sequences }]
            }
        }
    }

    /// Whether every set of cards is considered. Latency takes one search; the others take one for each
    /// number of stages or pieces, and many sets would keep people waiting.
    fn every_set(&self) -> bool {
        let sets = match self.pricer.request.objective {
            Objective::Latency => 1 << EXACT_CARDS,
            _ => MANY_SETS,
        };
        self.classes.sets() <= if self.classes.members.len() == 1 { EQUAL_CARDS + 1 } else { sets }
    }

    fn limits(&self, beat: f64) -> Limits {
        let width = (!self.every_set()).then_some(WIDTH);
        Limits { nodes: self.nodes_left.get().max(FEW_NODES), width, beat }
    }

    /// The groups that a search under a setting may use. Those of few cards are made for these alone; otherwise
    /// all are made once.
    fn pool(&self, wanted: &Wanted<'_>) -> Rc<Vec<Entry>> {
        let Wanted { family, setting, memory, share } = *wanted;
        let bits = |&(pass, count): &(Pass, f64)| {
            [pass.sequences, pass.tokens, pass.past, count.to_bits()]
        };
        let sets = |counts: &[u16]| {
            counts.iter().fold(1usize, |sets, &n| sets.saturating_mul(usize::from(n) + 1))
        };
        let few = !self.every_set() || sets(&share.available) < self.classes.sets() / FEW_SETS;
        let available = if few { share.available.clone() } else { self.classes.counts() };
        let others = setting.stages.map_or(0, |stages| stages - 1);
        let most_cards = match family {
            Strategy::OneCard | Strategy::Pipeline => 1,
            _ => self.cards() - others.min(self.cards() - 1),
        };
        let all_layers = memory && setting.stages == Some(1);
        let passes = setting.passes.iter().map(bits).collect();
        let key = (passes, setting.sequences, memory, available.clone(), all_layers);
        // Searches leave out groups that are too large for them.
        if let Some((most, pool)) = self.pools.borrow().get(&key)
            && *most >= most_cards
        {
            return Rc::clone(pool);
        }
        let (passes, sequences) = (Rc::clone(&setting.passes), setting.sequences);
        let terms = pool::Terms { passes, sequences, memory, available, most_cards, all_layers };
        let pool = Rc::new(match self.every_set() {
            true => pool::all(self.pricer, &self.classes, &terms),
            false => pool::runs(self.pricer, &self.classes, &terms),
        });
        self.pools.borrow_mut().insert(key, (most_cards, Rc::clone(&pool)));
        pool
    }

    fn all_cards(&self) -> Share {
        let available = self.classes.counts();
        Share { before: vec![0; available.len()], available }
    }

    /// How many stages a pipeline of a family has under a setting.
    fn stages(
        &self,
        family: Strategy,
        setting: &Setting,
        memory: bool,
    ) -> Option<RangeInclusive<usize>> {
        let range = match family {
            // What does not fit anyway is shown as it would come nearest: on all cards.
            Strategy::TensorPipeline if !memory => return None,
            Strategy::Pipeline if !memory => self.most_stages().max(2)..=self.most_stages(),
            Strategy::Pipeline | Strategy::TensorPipeline => 2..=self.most_stages(),
            _ => 1..=1,
        };
        let stages = match setting.stages {
            Some(only) if range.contains(&only) => only..=only,
            Some(_) => return None,
            None => range,
        };
        (!stages.is_empty()).then_some(stages)
    }

    /// The best pipeline of a family under one setting that scores less than `beat`: of all, or of those with
    /// stages of equally many cards, which are found at once.
    fn search(&self, wanted: &Wanted<'_>, even: bool, beat: f64) -> (Option<Found>, bool) {
        let Wanted { family, setting, memory, share } = *wanted;
        let Some(stages) = self.stages(family, setting, memory) else { return (None, true) };
        let pool = self.pool(wanted);
        let goal = Goal {
            score: setting.score,
            passes: Rc::clone(&setting.passes),
            head_in_turn: setting.head_in_turn,
            stages,
            allow: &|group| allows(family, group),
            need_tensor: family == Strategy::TensorPipeline,
            available: share.available.clone(),
            before: share.before.clone(),
        };
        let search = Search::new(self.pricer, &self.classes, &pool, goal, self.limits(beat));
        if even {
            return (search.even(), true);
        }
        let (found, exact, nodes) = search.run();
        self.nodes_left.set(self.nodes_left.get().saturating_sub(nodes));
        (found, exact)
    }

    /// The best layout of all that is wanted, by its prediction: first among stages of equally many cards, then among
    /// all. The scores of all that is wanted must mean the same.
    fn best_of_all(
        &self,
        wanted: &[Wanted<'_>],
        pricer: &Pricer<'_>,
        exact: &mut bool,
    ) -> Option<Scored> {
        let mut best: Option<Scored> = None;
        let mut beat = f64::INFINITY;
        for even in [true, false] {
            for wanted in wanted {
                let (found, sure) = self.search(wanted, even, beat);
                *exact &= sure;
                let Some(found) = found else { continue };
                let layout = search::layout(found.stages);
                // Layers that differ may overfill a card that equal ones would not.
                if wanted.memory && !fits(pricer, &layout) {
                    continue;
                }
                beat = beat.min(found.value);
                let score = scored(pricer, &layout);
                if best.as_ref().is_none_or(|best| score < best.score) {
                    best = Some(Scored { layout, score });
                }
            }
        }
        best
    }

    /// The predictions of what was found: what anyone gets who reads the plan. Large groups that are far behind the
    /// best, or do not fit where others do, keep the prices by which they were found: to simulate those takes
    /// longer than everything else, and changes nothing.
    fn candidates(&self, found: Vec<Scored>) -> Vec<Candidate> {
        let Pricer { model, cluster, request, .. } = *self.pricer;
        let simulated =
            Pricer::new(model, cluster, request).with_prices(self.pricer.prices()).exactly();
        let fitting = found.iter().filter(|scored| fits(self.pricer, &scored.layout));
        let best = fitting.map(|scored| scored.score).reduce(f64::min);
        let candidate = |scored: Scored| {
            let Scored { layout, score } = scored;
            let small = layout.tensor_ways() <= EXACT_CARDS;
            // Scores of throughput are negative.
            let far = |best: f64| score > best + (FAR - 1.0) * best.abs();
            let counts = || match best {
                Some(best) => !far(best) && fits(self.pricer, &layout),
                None => true,
            };
            let pricer = if small || counts() { &simulated } else { self.pricer };
            let prediction = predict(pricer, &layout);
            Candidate { strategy: layout.strategy(), layout, prediction }
        };
        found.into_iter().map(candidate).collect()
    }

    /// The best layout of a family over all settings, by its prediction.
    fn best_of(&self, family: Strategy, memory: bool, exact: &mut bool) -> Option<Scored> {
        let settings = self.settings(self.pricer.request.sequences);
        let share = &self.all_cards();
        let wanted = settings.iter().map(|setting| Wanted { family, setting, memory, share });
        self.best_of_all(&wanted.collect::<Vec<_>>(), self.pricer, exact)
    }

    /// The best copy of the model on a part of the cards.
    fn best_copy(&self, sequences: u64, share: &Share, exact: &mut bool) -> Option<Scored> {
        let request = Request { sequences, ..self.pricer.request.clone() };
        let Pricer { model, cluster, .. } = *self.pricer;
        let pricer = Pricer::new(model, cluster, &request).with_prices(self.pricer.prices());
        let cards: u32 = share.available.iter().copied().map(u32::from).sum();
        let settings = self.settings(sequences);
        let few = |setting: &&Setting| setting.stages.is_none_or(|stages| stages <= cards as usize);
        let memory = true;
        let wanted = settings.iter().filter(few).flat_map(|setting| {
            FAMILIES.into_iter().map(move |family| Wanted { family, setting, memory, share })
        });
        self.best_of_all(&wanted.collect::<Vec<_>>(), &pricer, exact)
    }

    /// Several copies of the model, the cards divided so that they do most together.
    fn replicas(&self, exact: &mut bool) -> Option<Scored> {
        let sequences = self.pricer.request.sequences;
        let most = (self.cards() as u64).min(sequences) as usize;
        let mut best: Option<Scored> = None;
        for copies in (2..=most).filter(|&copies| self.tried(copies)) {
            let served = sequences.div_ceil(copies as u64);
            let Some(parts) = self.parts(copies, served, exact) else { continue };
            let mut before = vec![0; parts[0].len()];
            let mut replicas = Vec::with_capacity(copies);
            for available in parts {
                let share = Share { available, before: before.clone() };
                let Some(copy) = self.best_copy(served, &share, exact) else { break };
                replicas.extend(copy.layout.replicas);
                for (before, taken) in before.iter_mut().zip(&share.available) {
                    *before += usize::from(*taken);
                }
            }
            if replicas.len() < copies {
                continue;
            }
            let layout = Layout { replicas };
            let score = scored(self.pricer, &layout);
            let better = best.as_ref().is_none_or(|best| score < best.score);
            if better && fits(self.pricer, &layout) {
                best = Some(Scored { layout, score });
            }
        }
        best
    }

    /// Deals the cards to the copies, fastest first, there and back, so that all get about the same.
    fn dealt(&self, copies: usize) -> Vec<Vec<u16>> {
        let classes = self.classes.members.iter().enumerate();
        let mut cards: Vec<(u64, usize)> = classes
            .flat_map(|(class, cards)| cards.iter().map(move |&card| (card, class)))
            .map(|(card, class)| {
                (self.pricer.cluster.profile(card).memory.bandwidth.value.0, class)
            })
            .collect();
        let equal = cards.windows(2).all(|pair| pair[0].0 == pair[1].0);
        if !equal {
            cards.sort_unstable_by(|a, b| b.cmp(a));
        }
        let count = cards.len();
        let mut parts = vec![vec![0; self.classes.members.len()]; copies];
        for (turn, (_, class)) in cards.into_iter().enumerate() {
            let (round, place) = (turn / copies, turn % copies);
            let copy = match round % 2 {
                // Neighbours stay together where nothing else counts.
                _ if equal => turn * copies / count,
                0 => place,
                _ => copies - 1 - place,
            };
            parts[copy][class] += 1;
        }
        parts
    }

    /// How many cards of each class each copy gets: the best of all ways where there are few sets of
    /// cards, else equal parts.
    fn parts(&self, copies: usize, sequences: u64, exact: &mut bool) -> Option<Vec<Vec<u16>>> {
        let counts = self.classes.counts();
        if self.classes.sets() > REPLICA_SETS {
            *exact = false;
            return Some(self.dealt(copies));
        }
        let sets = replicas::Sets::new(&counts);
        let mut rate = |set: usize| {
            let share = Share { available: sets.takes(set), before: vec![0; counts.len()] };
            self.best_copy(sequences, &share, exact).map(|copy| -copy.score)
        };
        let rates: Vec<Option<f64>> =
            (0..sets.len()).map(|set| if set == 0 { None } else { rate(set) }).collect();
        let parts = sets.partition(copies, &rates)?;
        Some(parts.into_iter().map(|set| sets.takes(set)).collect())
    }
}
