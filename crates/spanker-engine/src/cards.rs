// SPDX-License-Identifier: Apache-2.0
//! Cards behind the ABI, and those that are left when one is lost.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use spanker_llm::{LlmError, Loading, OnCards, Twice};
use spanker_plan::{Layout, Plan, Request};
use spanker_runtime::SpankerControl;
use spanker_scheduler::{Deadline, DeviceError, DeviceErrorKind, Error, Topology};
use spanker_topology::Cluster;

use crate::directory::{self, CardList};
use crate::error::{EngineError, Result};
use crate::host::{Backend, Event, Fabric, Load, Loaded, Watch};
use crate::layout;
use crate::model::Model;
use crate::profiles::Freshness;
use crate::threads::on_threads;

/// How often cards are looked at after a loss, for each of them.
const TURNS: usize = 3;
/// How long a step may take in all, as waited by the host.
const TOTAL: Duration = Duration::from_secs(3600);

/// The cards of a run.
pub(crate) struct Cards {
    folder: PathBuf,
    topology: Topology<SpankerControl>,
    timeout: Option<Duration>,
    /// Threads of this host, which check what cards compute.
    threads: usize,
}

impl Cards {
    /// Opens the cards that a list names, each once.
    pub(crate) fn open(
        folder: &Path,
        list: Option<&CardList>,
        timeout: Option<Duration>,
        threads: usize,
    ) -> Result<Cards> {
        let topology = directory::open_chosen(folder, list)?;
        Ok(Cards { folder: folder.to_path_buf(), topology, timeout, threads })
    }

    /// The cluster of some of the cards. Those of the whole run are open; others are asked anew, as they may have gone.
    fn cluster_of(&self, indices: &[usize]) -> Result<Cluster> {
        let found = match indices == self.topology.indices() {
            true => self.topology.cluster(),
            false => directory::open(&self.folder, indices)?.cluster(),
        };
        found.map_err(|error| directory::blamed(&self.folder, indices, &error))
    }

    /// Brings the model onto these cards, as a plan for them says.
    fn on_cards<'h>(&'h self, left: &[usize], load: &Load<'_>) -> Result<OnCards<'h>, LlmError> {
        let card = |place: usize| -> Option<&'h SpankerControl> {
            let index = left.get(place)?;
            let at = self.topology.indices().iter().position(|known| known == index)?;
            self.topology.sails().get(at)
        };
        let Request { context, batch, .. } = load.plan.request;
        let progress = |at: Loading| (load.observer)(&loading(at));
        let (network, plan) = (load.model.network(), load.plan);
        let (context, batch) = (context as usize, batch as usize);
        let runner = OnCards::load(network, plan, context, batch, &card, &progress);
        (load.observer)(&Event::Done);
        let mut runner = runner?;
        if let Some(detect) = self.timeout {
            runner.set_deadline(Deadline { detect, total: TOTAL, slow_after: None });
        }
        Ok(runner)
    }
}

/// How far loading is.
pub(crate) fn loading(at: Loading) -> Event<'static> {
    Event::Loading { done: at.done, total: at.total }
}

impl Backend for Cards {
    fn fabric(&self) -> Fabric {
        Fabric::Cards
    }

    fn indices(&self) -> Vec<usize> {
        self.topology.indices().to_vec()
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn cluster(
        &self,
        _: &Model,
        _: &Request,
        layout: &Layout,
        _: Freshness,
        _: &Watch,
    ) -> Result<Cluster> {
        let all = self.topology.indices();
        // A layout over fewer cards is for a group of its own: links to the others do not count.
        let cards = layout.cards().last().map_or(all.len(), |card| card + 1);
        self.cluster_of(all.get(..cards).unwrap_or(all))
    }

    fn measures_layouts(&self) -> bool {
        false
    }

    fn load<'h>(&'h self, left: &[usize], load: &Load<'_>) -> Result<Loaded<'h>, LlmError> {
        let mut runner = self.on_cards(left, load)?;
        let memory = runner.memory()?;
        if let Some(recorder) = load.recorder {
            runner.record(recorder)?;
        }
        let audit = load.plan.request.audit;
        if audit > 0.0 {
            runner.audit(load.model.network(), load.log);
        }
        if audit < 1.0 {
            return Ok(Loaded { runner: Box::new(runner), memory });
        }
        let host = on_threads(load.model, load.plan, self.threads)?;
        Ok(Loaded { runner: Box::new(Twice::new(Box::new(runner), Box::new(host))), memory })
    }

    fn replan(&self, left: &[usize], model: &Model, request: Request) -> Result<Plan> {
        let cluster = self.cluster_of(left)?;
        let layout = layout::best(model.shape(), &cluster, &request, false)?;
        layout::fitting(Plan::new(model.shape().clone(), cluster, request, layout)?, left)
    }

    /// Those that answer and reach each other.
    fn survivors(&self, error: &LlmError, left: &[usize]) -> Option<Vec<usize>> {
        let error = match error {
            LlmError::Device(error) => error,
            // No card by itself is wrong: everything is brought onto them anew.
            LlmError::Unsure { .. } => return Some(left.to_vec()),
            _ => return None,
        };
        let mut well: Vec<usize> = match error.kind() {
            DeviceErrorKind::LinkDown | DeviceErrorKind::Unreachable => left.to_vec(),
            DeviceErrorKind::Lost
            | DeviceErrorKind::Stuck
            | DeviceErrorKind::Slow
            | DeviceErrorKind::Wrong => {
                let lost = error.card()?;
                left.iter().copied().filter(|&index| index != lost).collect()
            }
            _ => return None,
        };
        // Others may be gone as well, or apart, and may go while they are looked at: a few turns for each.
        for _ in 0..TURNS * left.len() {
            let before = well.len();
            let alive = directory::alive(&self.folder);
            well.retain(|index| alive.contains(index));
            if well.is_empty() {
                return None;
            }
            let Ok(cards) = directory::open(&self.folder, &well) else { continue };
            match cards.group() {
                Ok(_) if well.len() == before => return Some(well),
                Ok(_) => {}
                Err(error) => {
                    let reached = cards.survivors(&error);
                    // Nobody by itself: whoever has gone since is not alive any more.
                    if reached.len() >= before && !self.lack_one(&well) {
                        return None;
                    }
                    well = reached;
                }
            }
        }
        None
    }

    fn lack_one(&self, left: &[usize]) -> bool {
        let alive = directory::alive(&self.folder);
        left.iter().any(|index| !alive.contains(index))
    }

    fn explain(&self, error: LlmError) -> EngineError {
        match error {
            LlmError::Device(error) => explain(&self.topology, error),
            other => other.into(),
        }
    }
}

/// The whole story of a fault of cards: who is at fault, what every card was waiting for, how to go on.
#[must_use]
pub fn explain(cards: &Topology<SpankerControl>, error: DeviceError) -> EngineError {
    let mut what = error.to_string();
    for (card, words) in error.waiting() {
        // Writing to a string does not fail.
        let _ = write!(what, "\n  card {card}: {words}");
    }
    let kind = error.kind();
    let left = cards.survivors(&Error::Device(error));
    let all = left.len() == cards.indices().len();
    let hint = match kind {
        DeviceErrorKind::LinkDown if all => {
            Some("the cards still reach each other without it: run the same again".to_owned())
        }
        DeviceErrorKind::Busy => Some("'spanker cards' shows the process that has it".to_owned()),
        DeviceErrorKind::Unreachable => {
            Some(format!("these reach each other: --cards {}", directory::list(&left)))
        }
        _ if all => None,
        _ => directory::go_on(&left),
    };
    EngineError::Unavailable { what, hint }
}
