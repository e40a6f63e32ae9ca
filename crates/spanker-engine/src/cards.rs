// SPDX-License-Identifier: Apache-2.0
//! Cards behind the ABI, and those that are left when one is lost.

use std::cell::{OnceCell, RefCell};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use spanker_fabric::device::examine;
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

/// Where cards are.
pub(crate) trait Devices: Send + Sync {
    /// Opens some of them.
    fn open(&self, indices: &[usize]) -> Result<Topology<SpankerControl>>;

    /// Those of some that answer. No other is asked.
    fn alive(&self, among: &[usize]) -> Vec<usize>;

    /// The card that is dead, where an error only says that one is.
    fn blamed(&self, indices: &[usize], error: &dyn std::fmt::Display) -> EngineError;
}

/// The device files of a folder.
struct Folder(PathBuf);

impl Devices for Folder {
    fn open(&self, indices: &[usize]) -> Result<Topology<SpankerControl>> {
        directory::open(&self.0, indices)
    }

    fn alive(&self, among: &[usize]) -> Vec<usize> {
        directory::alive_among(&self.0, among)
    }

    fn blamed(&self, indices: &[usize], error: &dyn std::fmt::Display) -> EngineError {
        directory::blamed(&self.0, indices, error)
    }
}

/// The cards of a run.
pub(crate) struct Cards {
    devices: Arc<dyn Devices>,
    opened: Opened,
    /// Looks whether cards that were lost can work again; gives those that can.
    scout: RefCell<Option<JoinHandle<Vec<usize>>>>,
    timeout: Option<Duration>,
    /// Threads of this host, which check what cards compute.
    threads: usize,
}

/// Handles to cards, and those that were opened after them because cards had come back: handles to a card that was gone
/// stay dead.
struct Opened {
    topology: Topology<SpankerControl>,
    later: OnceCell<Box<Opened>>,
}

impl Opened {
    fn new(topology: Topology<SpankerControl>) -> Opened {
        Opened { topology, later: OnceCell::new() }
    }

    /// The last ones.
    fn newest(&self) -> &Opened {
        let mut newest = self;
        while let Some(later) = newest.later.get() {
            newest = later;
        }
        newest
    }
}

/// Those of some cards that answer and calculate as they should.
fn sound(devices: &dyn Devices, missing: &[usize]) -> Vec<usize> {
    let is_sound = |index: &&usize| {
        let Ok(card) = devices.open(&[**index]) else { return false };
        card.sails().iter().all(|card| examine(card).unwrap_or(false))
    };
    missing.iter().filter(is_sound).copied().collect()
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
        Ok(Cards::of(Arc::new(Folder(folder.to_path_buf())), topology, timeout, threads))
    }

    /// Cards that are open.
    pub(crate) fn of(
        devices: Arc<dyn Devices>,
        topology: Topology<SpankerControl>,
        timeout: Option<Duration>,
        threads: usize,
    ) -> Cards {
        let (opened, scout) = (Opened::new(topology), RefCell::new(None));
        Cards { devices, opened, scout, timeout, threads }
    }

    /// The cluster of some of the cards. Those of the whole run are open; others are asked anew, as they may have gone.
    fn cluster_of(&self, indices: &[usize]) -> Result<Cluster> {
        let newest = &self.opened.newest().topology;
        let found = match indices == newest.indices() {
            true => newest.cluster(),
            false => self.devices.open(indices)?.cluster(),
        };
        found.map_err(|error| self.devices.blamed(indices, &error))
    }

    /// Brings the model onto these cards, as a plan for them says.
    fn on_cards<'h>(&'h self, left: &[usize], load: &Load<'_>) -> Result<OnCards<'h>, LlmError> {
        let newest = &self.opened.newest().topology;
        let card = |place: usize| -> Option<&'h SpankerControl> {
            let index = left.get(place)?;
            let at = newest.indices().iter().position(|known| known == index)?;
            newest.sails().get(at)
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
        self.opened.topology.indices().to_vec()
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
        let all = self.opened.topology.indices();
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
        let layout = layout::best(model.shape(), &cluster, &request, true, true)?;
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
            let alive = self.devices.alive(&well);
            well.retain(|index| alive.contains(index));
            if well.is_empty() {
                return None;
            }
            let Ok(cards) = self.devices.open(&well) else { continue };
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

    /// Cards are tried on a thread of their own, as one that hangs takes long to answer: what is found is known to a later
    /// call.
    fn returned(&self, left: &[usize]) -> Option<Vec<usize>> {
        let mut scout = self.scout.borrow_mut();
        let Some(thread) = scout.take_if(|thread| thread.is_finished()) else {
            if scout.is_none() {
                let all = self.opened.topology.indices().iter();
                let missing = all.copied().filter(|index| !left.contains(index));
                let (missing, devices): (Vec<usize>, _) = (missing.collect(), self.devices.clone());
                let look = move || sound(&*devices, &missing);
                *scout = std::thread::Builder::new().name("spanker-scout".into()).spawn(look).ok();
            }
            return None;
        };
        let back = thread.join().unwrap_or_default();
        let all = self.opened.topology.indices().iter().copied();
        let well: Vec<usize> = all.filter(|at| left.contains(at) || back.contains(at)).collect();
        if well.len() <= left.len() {
            return None;
        }
        // They have to reach each other, and those that work.
        let topology = self.devices.open(&well).ok()?;
        topology.group().ok()?;
        self.opened.newest().later.set(Box::new(Opened::new(topology))).ok()?;
        Some(well)
    }

    fn lack_one(&self, left: &[usize]) -> bool {
        let alive = self.devices.alive(left);
        left.iter().any(|index| !alive.contains(index))
    }

    fn explain(&self, error: LlmError) -> EngineError {
        match error {
            LlmError::Device(error) => explain(&self.opened.newest().topology, error),
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
