// SPDX-License-Identifier: Apache-2.0
//! Exchanges between the cards of a stage as descriptors: the schedules of `spanker-plan`, on whole buffers.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use spanker_collective::{Algorithm, Collective, CollectiveError, DType, ReduceOp, schedule};
use spanker_fabric::device::{DeviceGroup, Lowered, Wiring, lower};
use spanker_plan::{Plan, Price, cheapest, prices};
use spanker_runtime::{BufferId, Descriptor, Place, SpankerControl, Work};

use crate::program::Lowering;
use crate::{LlmError, Op};

/// What a schedule was lowered for: stage, collective, elements.
type Key = (usize, Collective, usize);

/// Buffers of a seat that exchanges use: padded parts, working memory, what is passed on.
type Scratch = [Option<(BufferId, u64)>; 3];

/// Lowers exchanges, each kind once.
#[derive(Debug)]
pub(super) struct Exchanges {
    stages: Vec<StageLinks>,
    /// Stage and rank of each seat.
    seats: Vec<(usize, usize)>,
    lowered: HashMap<Key, Rc<Lowered>>,
    scratch: Vec<Scratch>,
}

/// How the cards of a stage are wired, and what exchanges between them cost.
#[derive(Debug)]
struct StageLinks {
    wiring: Wiring,
    cards: Vec<usize>,
    cluster: spanker_topology::Cluster,
    prices: HashMap<Collective, Vec<Price>>,
}

const PADDED: usize = 0;
const WORKING: usize = 1;
const PASSED_ON: usize = 2;

impl Exchanges {
    pub(super) fn new(
        lowering: &Lowering,
        plan: &Plan,
        controls: &[&SpankerControl],
    ) -> Result<Exchanges, LlmError> {
        let mut stages = Vec::new();
        for (members, stage) in lowering.members.iter().zip(&plan.layout.replicas[0]) {
            let group = DeviceGroup::new(&controls[members.clone()])?;
            stages.push(StageLinks {
                wiring: group.wiring().clone(),
                cards: stage.group.cards.clone(),
                cluster: plan.cluster.clone(),
                prices: HashMap::new(),
            });
        }
        let seats: Vec<_> = lowering.seats.iter().map(|seat| (seat.stage, seat.rank)).collect();
        let scratch = vec![[None; 3]; seats.len()];
        Ok(Exchanges { stages, seats, lowered: HashMap::new(), scratch })
    }

    /// Appends a seat's part of an exchange to its program.
    pub(super) fn lower(
        &mut self,
        group: &DeviceGroup<'_>,
        seat: usize,
        op: &Op,
        buffers: &mut Vec<BufferId>,
        out: &mut Vec<Descriptor>,
    ) -> Result<(), LlmError> {
        let (stage, rank) = self.seats[seat];
        let mut on = On { exchanges: self, group, seat, stage, rank, buffers };
        match *op {
            Op::Gather { ref parts, rows, from, into } => on.gather(parts, rows, from, into, out),
            Op::Sum { data, elements } => {
                let key = (stage, Collective::AllReduce, elements as usize);
                on.collective(key, DType::F32, data, out)
            }
            Op::Spread { root, data, length } => {
                let key = (stage, Collective::Broadcast { root }, length as usize / 4);
                on.collective(key, DType::F32, data, out)
            }
            _ => Ok(()),
        }
    }

    /// The schedule of a collective in a stage: the cheapest by the plan's own prices. Sums are added in rank
    /// order, which two algorithms do.
    fn lowered(&mut self, key: Key, dtype: DType) -> Result<Rc<Lowered>, LlmError> {
        if let Some(known) = self.lowered.get(&key) {
            return Ok(Rc::clone(known));
        }
        let (stage, collective, elements) = key;
        let links = &mut self.stages[stage];
        let (cluster, cards) = (&links.cluster, &links.cards);
        let list = links.prices.entry(collective).or_insert_with(|| {
            let serial = [Algorithm::OneShot, Algorithm::TwoShot];
            let all = prices(cluster, collective, cards).into_iter();
            all.filter(|price| !collective.reduces() || serial.contains(&price.algorithm)).collect()
        });
        let (algorithm, _) = cheapest(list, (elements * dtype.size()) as f64);
        let ranks = links.wiring.ranks();
        let refused = |error: CollectiveError| LlmError::plan(error.to_string());
        let schedule = schedule(collective, algorithm, ranks, elements).map_err(refused)?;
        let lowered = Rc::new(lower(&schedule, &links.wiring, dtype, ReduceOp::Sum)?);
        self.lowered.insert(key, Rc::clone(&lowered));
        Ok(lowered)
    }
}

/// One seat's side of an exchange.
struct On<'e, 'g> {
    exchanges: &'e mut Exchanges,
    group: &'e DeviceGroup<'g>,
    seat: usize,
    stage: usize,
    rank: usize,
    buffers: &'e mut Vec<BufferId>,
}

impl On<'_, '_> {
    /// A buffer of at least so many bytes.
    fn room(&mut self, kind: usize, bytes: u64) -> Result<BufferId, LlmError> {
        if let Some((buffer, size)) = self.exchanges.scratch[self.seat][kind]
            && size >= bytes
        {
            return Ok(buffer);
        }
        // The smaller one stays until the end: work that was described before may name it.
        let size = bytes.next_power_of_two();
        let buffer = self.group.request(self.seat, |card| card.allocate(size))?;
        self.buffers.push(buffer);
        self.exchanges.scratch[self.seat][kind] = Some((buffer, size));
        Ok(buffer)
    }

    /// A collective on a whole buffer.
    fn collective(
        &mut self,
        key: Key,
        dtype: DType,
        data: Place,
        out: &mut Vec<Descriptor>,
    ) -> Result<(), LlmError> {
        let lowered = self.exchanges.lowered(key, dtype)?;
        let scratch = self.room(WORKING, lowered.scratch_bytes().max(1))?;
        let relay = self.room(PASSED_ON, lowered.relay_bytes(self.rank).max(1))?;
        let start = out.len() as u32;
        // Schedules count from the start of a buffer.
        let moved = |place: &mut Place| {
            if place.buffer == data.buffer {
                place.offset += data.offset;
            }
        };
        for mut one in lowered.bind(self.rank, data.buffer, scratch, relay) {
            one.after = one.after.map(|at| at + start);
            match &mut one.work {
                Work::Copy { from, into, .. } => [from, into].into_iter().for_each(moved),
                Work::Reduce { into, sources, .. } => {
                    moved(into);
                    sources.iter_mut().for_each(moved);
                }
                Work::Send { from: place, .. } | Work::Receive { into: place, .. } => moved(place),
                _ => {}
            }
            out.push(one);
        }
        Ok(())
    }

    /// An all-gather of parts that need not be equal: they travel padded to the longest.
    fn gather(
        &mut self,
        parts: &[Range<u64>],
        rows: u64,
        from: Place,
        into: Place,
        out: &mut Vec<Descriptor>,
    ) -> Result<(), LlmError> {
        let length = |part: &Range<u64>| part.end - part.start;
        let longest = parts.iter().map(length).max().unwrap_or(0);
        let chunk = rows * longest;
        let own = length(&parts[self.rank]);
        let key = (self.stage, Collective::AllGather, (chunk as usize) * parts.len());
        let equal = parts.iter().all(|part| length(part) == longest);
        // Equal parts of one row lie in the result as they do in the schedule.
        let in_place = equal && rows == 1;
        let data = match in_place {
            true => into,
            false => Place { buffer: self.room(PADDED, chunk * parts.len() as u64)?, offset: 0 },
        };
        if own > 0 {
            let slot = Place { offset: data.offset + self.rank as u64 * chunk, ..data };
            out.push(Work::Copy { from, into: slot, length: rows * own }.into());
        }
        self.collective(key, DType::U8, data, out)?;
        if in_place {
            return Ok(());
        }
        let row = parts.last().map_or(0, |part| part.end);
        for (rank, part) in parts.iter().enumerate().filter(|(_, part)| length(part) > 0) {
            let from = Place { offset: data.offset + rank as u64 * chunk, ..data };
            let into = Place { offset: into.offset + part.start, ..into };
            let (length, from_stride, into_stride) = (length(part), length(part), row);
            out.push(Work::Rows { from, into, rows, length, from_stride, into_stride }.into());
        }
        Ok(())
    }
}
