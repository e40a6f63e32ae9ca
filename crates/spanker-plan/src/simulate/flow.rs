// SPDX-License-Identifier: Apache-2.0
//! A schedule reduced to what takes time: who sends how much to whom, in which step it is awaited, and what
//! each step does in the card's own memory.

use std::cell::OnceCell;

use spanker_collective::{
    Algorithm, Collective, Levels, Local, Message, Schedule, Transfer, levels, schedule,
};

/// Elements for each rank in the schedules that are timed: chunks are then equal, whatever the algorithm.
const GRAIN: usize = 60;

/// A message of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sent {
    pub(crate) to: u32,
    /// The receiver's step that waits for it.
    pub(crate) at_step: u32,
    /// The part of the collective's bytes that it carries.
    pub(crate) fraction: f64,
}

/// One step of one rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct FlowStep {
    pub(crate) sends: Vec<Sent>,
    pub(crate) receives: u32,
    /// Parts of the collective's bytes that its messages touch in the card's memory: a send its span once, a
    /// receive once or, if it folds, twice.
    pub(crate) touched: f64,
    /// Copies and folds after the messages: the part of the collective's bytes that each touches.
    pub(crate) locals: Vec<f64>,
}

/// The messages of a schedule, for each rank.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Flow {
    collective: Collective,
    algorithm: Algorithm,
    programs: Vec<Vec<FlowStep>>,
    /// Elements of the collective.
    whole: f64,
    /// The messages by level, for those who need them.
    levels: OnceCell<Levels>,
}

impl Flow {
    /// The messages of a collective by an algorithm.
    pub(crate) fn new(collective: Collective, algorithm: Algorithm, ranks: usize) -> Flow {
        Flow::of(&timed_schedule(collective, algorithm, ranks))
    }

    /// The messages in the order in which cards go through them.
    pub(crate) fn levels(&self) -> &Levels {
        self.levels.get_or_init(|| {
            let built = timed_schedule(self.collective, self.algorithm, self.programs.len());
            levels(&built).expect("messages of a schedule match")
        })
    }

    /// The part of the collective's bytes that a message carries.
    pub(crate) fn fraction(&self, message: &Message) -> f64 {
        message.source.len as f64 / self.whole
    }

    pub(crate) fn program(&self, rank: usize) -> &[FlowStep] {
        &self.programs[rank]
    }

    /// Every message of a collective of so many bytes: from which rank, to which, and its bytes.
    pub(crate) fn messages(&self, bytes: f64) -> impl Iterator<Item = (usize, usize, f64)> + '_ {
        self.programs.iter().enumerate().flat_map(move |(rank, steps)| {
            let sends = steps.iter().flat_map(|step| &step.sends);
            sends.map(move |sent| (rank, sent.to as usize, bytes * sent.fraction))
        })
    }

    /// Pairs up sends and receives: the k-th message from one rank to another is the k-th that the other
    /// awaits from it.
    fn of(schedule: &Schedule) -> Flow {
        let ranks = schedule.ranks();
        let whole = schedule.data_len().max(1) as f64;
        // For each pair, the steps in which the receiver awaits a message, in order.
        let mut awaited = vec![Vec::new(); ranks * ranks];
        for rank in 0..ranks {
            for (step, content) in schedule.program(rank).iter().enumerate() {
                for transfer in &content.transfers {
                    if let Transfer::Recv { from, .. } = transfer {
                        awaited[from * ranks + rank].push(step as u32);
                    }
                }
            }
        }
        let mut sent = vec![0usize; ranks * ranks];
        let programs = (0..ranks).map(|rank| {
            let steps = schedule.program(rank).iter().map(|step| {
                let mut flow = FlowStep::default();
                for transfer in &step.transfers {
                    match *transfer {
                        Transfer::Recv { span, fold, .. } => {
                            flow.receives += 1;
                            let times = if fold.is_some() { 2.0 } else { 1.0 };
                            flow.touched += times * span.len as f64 / whole;
                        }
                        Transfer::Send { to, span } => {
                            let pair = rank * ranks + to;
                            let at_step = awaited[pair][sent[pair]];
                            sent[pair] += 1;
                            let fraction = span.len as f64 / whole;
                            flow.touched += fraction;
                            flow.sends.push(Sent { to: to as u32, at_step, fraction });
                        }
                    }
                }
                flow.locals =
                    step.locals.iter().filter_map(|local| of_local(local, whole)).collect();
                // Messages of a step are concurrent: each rank begins with its next neighbour, so that
                // not everyone sends to the same one first.
                flow.sends.sort_by_key(|sent| (sent.to as usize + ranks - rank) % ranks);
                flow
            });
            steps.collect()
        });
        Flow {
            collective: schedule.collective(),
            algorithm: schedule.algorithm(),
            programs: programs.collect(),
            whole,
            levels: OnceCell::new(),
        }
    }
}

fn timed_schedule(collective: Collective, algorithm: Algorithm, ranks: usize) -> Schedule {
    let built = schedule(collective, algorithm, ranks, ranks * GRAIN);
    built.expect("a group of cards is not too large")
}

/// The part of a collective's bytes that a copy or a fold touches. Cards are not given work on nothing.
fn of_local(local: &Local, whole: f64) -> Option<f64> {
    let (spans, elements) = match local {
        Local::Copy { into, .. } => (2, into.len),
        Local::Fold { sources, into } => (sources.len() + 1, into.len),
    };
    (elements > 0).then(|| (spans * elements) as f64 / whole)
}
