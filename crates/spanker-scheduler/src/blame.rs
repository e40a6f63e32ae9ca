// SPDX-License-Identifier: Apache-2.0
//! Which card is to blame for wrong results, if every card passes a test on its own. Pure: it follows where
//! the elements of a result have been, and compares that with where they are wrong.
//!
//! It is for one card that fails. Of two explanations that are equally good the first is taken, and both are
//! returned.

use std::collections::{BTreeSet, HashMap, VecDeque};

use spanker_collective::{
    Algorithm, Buffer, Collective, Local, Rank, Schedule, Span, Step, Transfer, schedule,
};
use spanker_plan::Wiring;

use crate::Result;
use crate::expected::Seen;

/// What a card may do wrong. Cards are tested for what they compute before anybody is blamed, and not for what
/// they send: of equal explanations the latter comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// It changes what it sends or passes on.
    Sends(Rank),
    /// It computes or holds what is wrong.
    Computes(Rank),
}

impl Fault {
    fn rank(self) -> Rank {
        match self {
            Fault::Sends(rank) | Fault::Computes(rank) => rank,
        }
    }
}

/// All faults that would show in an element.
type Past = BTreeSet<Fault>;

/// The ranks that explain best what was seen, most likely first: those whose one fault shows in most of what is
/// wrong, and of these in the least of what is right.
///
/// # Errors
/// As [`schedule`].
pub(crate) fn suspects(
    collective: Collective,
    algorithm: Algorithm,
    wiring: &Wiring,
    seen: &[Seen],
) -> Result<Vec<Rank>> {
    let ranks = wiring.ranks();
    // Algorithms deal in whole chunks, so an element of each stands for all of it.
    let pasts = pasts(&schedule(collective, algorithm, ranks, ranks)?, wiring);
    let past = |seen: &Seen| match collective {
        Collective::ReduceScatter => &pasts[seen.holder][seen.holder],
        _ => &pasts[seen.holder][seen.part],
    };
    let faults = (0..ranks).map(Fault::Sends).chain((0..ranks).map(Fault::Computes));
    let score = |fault: Fault| {
        let shows =
            |seen: &&Seen| past(seen).contains(&fault) || fault == Fault::Computes(seen.holder);
        let (wrong, right): (Vec<&Seen>, Vec<&Seen>) =
            seen.iter().filter(shows).partition(|seen| seen.wrong.is_some());
        (wrong.len(), std::cmp::Reverse(right.len()))
    };
    let scored: Vec<_> = faults.map(|fault| (score(fault), fault)).collect();
    let best = scored.iter().map(|&(score, _)| score).max();
    let mut named = Vec::new();
    for (_, fault) in scored.iter().filter(|&&(score, _)| Some(score) == best) {
        if !named.contains(&fault.rank()) {
            named.push(fault.rank());
        }
    }
    Ok(named)
}

/// One rank's buffers.
#[derive(Debug, Clone)]
struct Memory {
    data: Vec<Past>,
    scratch: Vec<Past>,
}

impl Memory {
    fn read(&self, span: Span) -> Vec<Past> {
        let from = match span.buffer {
            Buffer::Data => &self.data,
            Buffer::Scratch => &self.scratch,
        };
        from[span.start..span.start + span.len].to_vec()
    }

    fn write(&mut self, span: Span, pasts: Vec<Past>) {
        let into = match span.buffer {
            Buffer::Data => &mut self.data,
            Buffer::Scratch => &mut self.scratch,
        };
        for (place, past) in into[span.start..].iter_mut().zip(pasts) {
            *place = past;
        }
    }
}

/// Where the elements of every rank's data have been when a schedule is done.
fn pasts(schedule: &Schedule, wiring: &Wiring) -> Vec<Vec<Past>> {
    let ranks = schedule.ranks();
    let empty = |length| vec![Past::new(); length];
    let blank = Memory { data: empty(schedule.data_len()), scratch: empty(schedule.scratch_len()) };
    let mut memories = vec![blank; ranks];
    let mut travelling: HashMap<(Rank, Rank), VecDeque<Vec<Past>>> = HashMap::new();
    // Each rank's step, and whether its messages have left.
    let mut places = vec![(0, false); ranks];
    loop {
        let mut moved = false;
        for rank in 0..ranks {
            let (at, sent) = places[rank];
            let Some(step) = schedule.program(rank).get(at) else { continue };
            if !sent {
                send(step, rank, &memories[rank], wiring, &mut travelling);
            }
            let complete = has_arrived(step, rank, &travelling);
            if complete {
                finish(step, rank, &mut memories[rank], &mut travelling);
            }
            places[rank] = if complete { (at + 1, false) } else { (at, true) };
            moved |= complete || !sent;
        }
        if !moved {
            return memories.into_iter().map(|memory| memory.data).collect();
        }
    }
}

/// Messages that have left and not arrived, by sender and receiver.
type Travelling = HashMap<(Rank, Rank), VecDeque<Vec<Past>>>;

fn send(step: &Step, rank: Rank, memory: &Memory, wiring: &Wiring, travelling: &mut Travelling) {
    for transfer in &step.transfers {
        let Transfer::Send { to, span } = *transfer else { continue };
        let mut message = memory.read(span);
        let route = wiring.route(rank, to);
        for past in &mut message {
            past.extend(route[..route.len() - 1].iter().map(|&hop| Fault::Sends(hop)));
        }
        travelling.entry((rank, to)).or_default().push_back(message);
    }
}

/// Whether all that a step waits for is there.
fn has_arrived(step: &Step, rank: Rank, travelling: &Travelling) -> bool {
    let mut awaited: HashMap<Rank, usize> = HashMap::new();
    for transfer in &step.transfers {
        if let Transfer::Recv { from, .. } = *transfer {
            *awaited.entry(from).or_default() += 1;
        }
    }
    awaited.iter().all(|(&from, &count)| {
        travelling.get(&(from, rank)).is_some_and(|messages| messages.len() >= count)
    })
}

/// Receives what a step receives, and does its local work.
fn finish(step: &Step, rank: Rank, memory: &mut Memory, travelling: &mut Travelling) {
    let merge = |into: &mut Vec<Past>, from: Vec<Past>| {
        for (into, from) in into.iter_mut().zip(from) {
            into.extend(from);
            into.insert(Fault::Computes(rank));
        }
    };
    for transfer in &step.transfers {
        let Transfer::Recv { from, span, fold } = *transfer else { continue };
        let queue = travelling.get_mut(&(from, rank));
        let Some(mut message) = queue.and_then(VecDeque::pop_front) else { continue };
        if fold.is_some() {
            merge(&mut message, memory.read(span));
        }
        memory.write(span, message);
    }
    for local in &step.locals {
        let (sources, into) = match local {
            Local::Copy { from, into } => (std::slice::from_ref(from), *into),
            Local::Fold { sources, into } => (&sources[..], *into),
        };
        let mut result = vec![Past::new(); into.len];
        for &source in sources {
            merge(&mut result, memory.read(source));
        }
        memory.write(into, result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(ranks: usize) -> Wiring {
        let links: Vec<_> = match ranks {
            1 => Vec::new(),
            2 => vec![(0, 0, 1, 0)],
            _ => (0..ranks).map(|rank| (rank, 0, (rank + 1) % ranks, 1)).collect(),
        };
        Wiring::from_links(ranks, &links).unwrap()
    }

    /// What is seen if a fault shows wherever it can.
    fn seen(collective: Collective, pasts: &[Vec<Past>], fault: Fault) -> Vec<Seen> {
        let mut all = Vec::new();
        for (holder, data) in pasts.iter().enumerate() {
            for (part, past) in data.iter().enumerate() {
                let own = Fault::Computes(holder) == fault && collective.reduces();
                let wrong = (past.contains(&fault) || own).then_some(part);
                match collective {
                    Collective::ReduceScatter if part != holder => {}
                    Collective::ReduceScatter => all.push(Seen { holder, part: 0, wrong }),
                    _ => all.push(Seen { holder, part, wrong }),
                }
            }
        }
        all
    }

    #[test]
    fn card_that_garbles_what_it_sends_is_named_for_every_algorithm() {
        let collectives = [
            Collective::AllReduce,
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::AllToAll,
        ];
        for (collective, ranks) in collectives.into_iter().flat_map(|c| [(c, 3), (c, 4), (c, 6)]) {
            for algorithm in Algorithm::ALL {
                let wiring = ring(ranks);
                let pasts = pasts(&schedule(collective, algorithm, ranks, ranks).unwrap(), &wiring);
                for culprit in 0..ranks {
                    let seen = seen(collective, &pasts, Fault::Sends(culprit));
                    if seen.iter().all(|seen| seen.wrong.is_none()) {
                        continue;
                    }
                    let named = suspects(collective, algorithm, &wiring, &seen).unwrap();
                    assert!(
                        named.contains(&culprit),
                        "{collective:?} {algorithm:?} {ranks} {culprit}: {named:?}"
                    );
                    let direct = matches!(
                        algorithm,
                        Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Ring
                    );
                    let spread =
                        matches!(collective, Collective::AllReduce | Collective::AllGather);
                    assert!(
                        !(direct && spread) || named == [culprit],
                        "{collective:?} {algorithm:?} {ranks} {culprit}: {named:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn card_that_computes_wrongly_in_an_all_reduce_is_named() {
        for (algorithm, ranks) in
            [Algorithm::OneShot, Algorithm::TwoShot].into_iter().flat_map(|a| [(a, 3), (a, 5)])
        {
            let wiring = ring(ranks);
            let pasts =
                pasts(&schedule(Collective::AllReduce, algorithm, ranks, ranks).unwrap(), &wiring);
            for culprit in 0..ranks {
                let seen = seen(Collective::AllReduce, &pasts, Fault::Computes(culprit));
                let named = suspects(Collective::AllReduce, algorithm, &wiring, &seen).unwrap();
                assert_eq!(named, [culprit], "{algorithm:?} {ranks}");
            }
        }
    }

    #[test]
    fn card_that_only_passes_messages_on_is_named_where_it_garbles_them() {
        // A line of three: what 0 and 2 exchange goes through 1.
        let line = Wiring::from_links(3, &[(0, 0, 1, 0), (1, 1, 2, 0)]).unwrap();
        let wrong = |holder, part| Seen { holder, part, wrong: Some(part) };
        let right = |holder, part| Seen { holder, part, wrong: None };
        let seen = [
            right(0, 0),
            wrong(0, 1),
            wrong(0, 2),
            right(1, 0),
            right(1, 1),
            right(1, 2),
            wrong(2, 0),
            wrong(2, 1),
            right(2, 2),
        ];
        let named = suspects(Collective::AllGather, Algorithm::OneShot, &line, &seen).unwrap();
        assert_eq!(named, [1]);
    }

    #[test]
    fn result_that_two_cards_explain_equally_well_names_both_and_the_sender_first() {
        let seen = [
            Seen { holder: 0, part: 0, wrong: None },
            Seen { holder: 0, part: 1, wrong: None },
            Seen { holder: 1, part: 0, wrong: Some(0) },
            Seen { holder: 1, part: 1, wrong: Some(1) },
        ];
        let named = suspects(Collective::AllReduce, Algorithm::OneShot, &ring(2), &seen).unwrap();
        assert_eq!(named, [0, 1]);
    }
}
