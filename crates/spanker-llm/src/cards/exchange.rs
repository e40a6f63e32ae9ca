// SPDX-License-Identifier: Apache-2.0
//! Collectives between the cards of a stage as descriptors: the schedules that the planner finds cheapest, on
//! buffers that the plan has sized.

use std::collections::HashMap;
use std::rc::Rc;

use spanker_collective::{Collective, DType, ReduceOp, schedule};
use spanker_fabric::device::{DeviceGroup, Lowered, lower};
use spanker_plan::{Buffer, Fold, Place, Plan, PriceList, Programs, Wiring};
use spanker_runtime::{BufferId, Descriptor, SpankerControl};
use spanker_topology::Cluster;

use super::load::Buffers;
use crate::LlmError;

/// What a schedule was lowered for: stage, collective, elements, and what is folded.
type Key = (usize, Collective, u64, Fold);

/// Lowers collectives, each kind once.
#[derive(Debug)]
pub(super) struct Exchanges {
    stages: Vec<StageLinks>,
    cluster: Cluster,
    prices: PriceList,
    lowered: HashMap<Key, Rc<Lowered>>,
    /// Bytes of the buffers of each member that collectives work in.
    sizes: Vec<HashMap<Buffer, u64>>,
}

/// How the cards of a stage are wired.
#[derive(Debug)]
struct StageLinks {
    wiring: Wiring,
    cards: Vec<usize>,
}

impl Exchanges {
    pub(super) fn new(
        programs: &Programs,
        plan: &Plan,
        controls: &[&SpankerControl],
        sizes: Vec<HashMap<Buffer, u64>>,
    ) -> Result<Exchanges, LlmError> {
        let mut stages = Vec::new();
        for (members, stage) in programs.groups().iter().zip(&plan.layout.replicas[0]) {
            let group = DeviceGroup::new(&controls[members.clone()])?;
            stages.push(StageLinks {
                wiring: group.wiring().clone(),
                cards: stage.group.cards.clone(),
            });
        }
        let (cluster, prices) = (plan.cluster.clone(), PriceList::default());
        Ok(Exchanges { stages, cluster, prices, lowered: HashMap::new(), sizes })
    }

    /// The schedule of a collective in a stage: the one that the plan was priced with.
    fn lowered(&mut self, key: Key) -> Result<Rc<Lowered>, LlmError> {
        if let Some(known) = self.lowered.get(&key) {
            return Ok(Rc::clone(known));
        }
        let (stage, collective, elements, fold) = key;
        let links = &self.stages[stage];
        let bytes = elements as f64 * fold.size() as f64;
        let unknown = || LlmError::plan(format!("a collective of {fold:?}"));
        let dtype = DType::from_code(fold.dtype).ok_or_else(unknown)?;
        let op = ReduceOp::from_code(fold.op).ok_or_else(unknown)?;
        let (algorithm, _) = self.prices.best(&self.cluster, collective, &links.cards, bytes);
        let ranks = links.wiring.ranks();
        let refused =
            |error: spanker_collective::CollectiveError| LlmError::plan(error.to_string());
        let schedule =
            schedule(collective, algorithm, ranks, elements as usize).map_err(refused)?;
        let lowered = Rc::new(lower(&schedule, &links.wiring, dtype, op)?);
        self.lowered.insert(key, Rc::clone(&lowered));
        Ok(lowered)
    }

    /// Appends a member's part of a collective on `data` to its program.
    pub(super) fn lower(
        &mut self,
        (member, rank): (usize, usize),
        key: Key,
        data: Place,
        buffers: &Buffers,
        out: &mut Vec<Descriptor>,
    ) -> Result<(), LlmError> {
        let lowered = self.lowered(key)?;
        let needs = [
            (Buffer::Working, lowered.scratch_bytes()),
            (Buffer::PassedOn, lowered.relay_bytes(rank)),
        ];
        for (buffer, needed) in needs {
            let has = self.sizes[member].get(&buffer).copied().unwrap_or(0);
            if needed > has {
                let what = buffer.name();
                return Err(LlmError::plan(format!(
                    "a collective needs {needed} bytes for {what}, and the plan has {has}"
                )));
            }
        }
        let id = |buffer: Buffer| buffers.get(&buffer).copied().unwrap_or(BufferId(0));
        let (working, passed_on) = (id(Buffer::Working), id(Buffer::PassedOn));
        let start = out.len() as u32;
        for mut one in lowered.bind(rank, data.buffer, working, passed_on) {
            one.after = one.after.map(|at| at + start);
            // Schedules count from the start of a buffer.
            for place in one.work.places_mut() {
                if place.buffer == data.buffer {
                    place.offset += data.offset;
                }
            }
            out.push(one);
        }
        Ok(())
    }
}
