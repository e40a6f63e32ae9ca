// SPDX-License-Identifier: Apache-2.0
//! From a layout to its prediction: prices of the programs of one layer of each kind, multiplied.

use spanker_topology::{Seconds, Shape};

use crate::cost::Pricer;
use crate::cost::pass::Pass;
use crate::plan::{CardMemory, Layout, Prediction, Stage, in_flight, place, served};
use crate::program::Terms;
use crate::{Objective, Request};

/// One pass through a pipeline: all stages one after the other, and the longest one.
pub(crate) struct Passed {
    pub(crate) sum: Terms,
    pub(crate) longest: Seconds,
}

/// A pass through the stages without the host: hand-offs, layers, embedding and head.
pub(crate) fn pass_through(
    pricer: &Pricer<'_>,
    stages: &[Stage],
    pass: Pass,
    with_head: bool,
) -> Passed {
    let mut sum = Terms::default();
    let mut longest = Seconds::ZERO;
    for (index, stage) in stages.iter().enumerate() {
        let ends = (index == 0, with_head && index + 1 == stages.len());
        let mut terms = pricer.stage(stage.layers.clone(), &stage.group, pass, ends);
        if let Some(before) = index.checked_sub(1) {
            let from = &stages[before].group;
            terms.communication += pricer.hop(&from.cards, &stage.group.cards, pass.rows());
        }
        longest = longest.max(terms.total());
        sum = sum.plus(terms);
    }
    Passed { sum, longest }
}

/// The time of one token in a pipeline that `batches` micro-batches share, and where it goes.
fn decode(
    pricer: &Pricer<'_>,
    stages: &[Stage],
    batches: u64,
    sequences: u64,
    position: u64,
) -> (Terms, Seconds) {
    let pass = Pass::decode(sequences, position);
    let passed = pass_through(pricer, stages, pass, true);
    let (first, last) = (&stages[0].group.cards, &stages[stages.len() - 1].group.cards);
    let sum = passed.sum.plus(pricer.host(first, last, true));
    let turn = passed.longest * batches as f64;
    (sum, (turn - sum.total()).max(Seconds::ZERO))
}

/// Pieces of a prompt that are priced one by one in predictions that somebody reads.
const MOST_PIECES: f64 = 16.0;

/// The time to the first token and where it goes: the pieces of the prompt one after the other, as runs do it.
fn first_token(pricer: &Pricer<'_>, stages: &[Stage], sequences: u64) -> (Seconds, Terms, u64) {
    let request = pricer.request;
    let (first, last) = (&stages[0].group, &stages[stages.len() - 1].group);
    let passes = Pass::prefill(sequences, request.prompt, request.batch);
    let pieces: f64 = passes.iter().map(|(_, count)| count).sum();
    let mut sum = pricer.head(last, sequences);
    if pricer.is_exact() && pieces <= MOST_PIECES {
        for pass in Pass::pieces(sequences, request.prompt, request.batch) {
            sum = sum.plus(pass_through(pricer, stages, pass, false).sum);
        }
    } else {
        for (pass, count) in passes {
            sum = sum.plus(pass_through(pricer, stages, pass, false).sum.times(count));
        }
    }
    let (first, last) = (&first.cards, &last.cards);
    let between = pricer.host(first, last, false).times(pieces - 1.0);
    sum = sum.plus(between).plus(pricer.host(first, last, true));
    (sum.total(), sum, pieces as u64)
}
fn memory(pricer: &Pricer<'_>, layout: &Layout) -> Vec<CardMemory> {
    let mut list = Vec::new();
    for stages in &layout.replicas {
        for (index, stage) in stages.iter().enumerate() {
            let place = place(pricer.request, layout, index, stages.len());
            for (rank, &card) in stage.group.cards.iter().enumerate() {
                let footprint = pricer.footprint(stage.layers.clone(), &stage.group, rank, place);
                let memory = &pricer.cluster.profile(card).memory;
                let (reserved, capacity) = (memory.reserved.value, memory.capacity.value);
                list.push(CardMemory { card, footprint, reserved, capacity });
            }
        }
    }
    list.sort_by_key(|memory| memory.card);
    list
}

/// Until all weights are on the cards: all host links at once, unless the host is shared.
fn load(pricer: &Pricer<'_>, memory: &[CardMemory]) -> Seconds {
    let time = |m: &CardMemory| pricer.cluster.upload(m.card, m.footprint.weights);
    match pricer.cluster.shape() {
        Shape::Star => memory.iter().map(time).sum(),
        _ => memory.iter().map(time).fold(Seconds::ZERO, Seconds::max),
    }
}

/// Sequences whose prompts come together: under load prompts come one at a time.
fn prompts(request: &Request) -> u64 {
    if request.objective == Objective::Throughput { 1 } else { request.sequences }
}

/// What the objective of a request minimises, as the prediction of a layout has it; nothing else is priced.
pub(crate) fn scored(pricer: &Pricer<'_>, layout: &Layout) -> f64 {
    let request = pricer.request;
    let token = |copy: usize, stages: &[Stage]| {
        let served = served(request, layout, copy);
        let (batches, together) = in_flight(request, served.max(1), stages.len());
        let (terms, waiting) = decode(pricer, stages, batches, together, request.position);
        (served as f64, (terms.total() + waiting).0)
    };
    let copies = layout.replicas.iter().enumerate();
    match request.objective {
        Objective::Latency => copies.map(|(copy, s)| token(copy, s).1).fold(0.0, f64::max),
        Objective::Throughput => {
            let rate = |(served, time): (f64, f64)| served / time;
            -copies.map(|(copy, stages)| rate(token(copy, stages))).sum::<f64>()
        }
        Objective::Ttft => {
            let first = |(_, stages): (usize, &Vec<Stage>)| {
                first_token(pricer, stages, prompts(request)).0.0
            };
            copies.map(first).fold(0.0, f64::max)
        }
    }
}

/// Whether every card of a layout has the memory for it.
pub(crate) fn fits(pricer: &Pricer<'_>, layout: &Layout) -> bool {
    memory(pricer, layout).iter().all(CardMemory::fits)
}

/// What a layout is predicted to do.
pub(crate) fn predict(pricer: &Pricer<'_>, layout: &Layout) -> Prediction {
    let request = pricer.request;
    let mut worst: Option<(Terms, Seconds, Seconds)> = None;
    let mut rate = 0.0;
    let mut ttft: Option<(Seconds, Terms, u64)> = None;
    for (copy, stages) in layout.replicas.iter().enumerate() {
        let served = served(request, layout, copy);
        let (batches, together) = in_flight(request, served.max(1), stages.len());
        let (terms, waiting) = decode(pricer, stages, batches, together, request.position);
        let time = terms.total() + waiting;
        rate += served as f64 / time.0;
        if worst.is_none_or(|(terms, waiting, _)| time.0 > (terms.total() + waiting).0) {
            let last = request.context - 1;
            let (late, late_waiting) = decode(pricer, stages, batches, together, last);
            worst = Some((terms, waiting, late.total() + late_waiting));
        }
        let first = first_token(pricer, stages, prompts(request));
        if ttft.is_none_or(|(slowest, _, _)| first.0.0 > slowest.0) {
            ttft = Some(first);
        }
    }
    let (terms, waiting, token_at_context) = worst.expect("a layout has a replica");
    let (ttft, ttft_terms, prefill_pieces) = ttft.expect("a layout has a replica");
    let memory = memory(pricer, layout);
    Prediction {
        token: terms.total() + waiting,
        terms,
        waiting,
        token_at_context,
        tokens_per_second: rate,
        ttft,
        ttft_terms,
        prefill_pieces,
        load: load(pricer, &memory),
        memory,
    }
}
