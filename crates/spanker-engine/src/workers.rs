// SPDX-License-Identifier: Apache-2.0
//! Workers of other machines: how this process and those that answer become a group of ranks, again after each fault, and
//! what a worker does.
//!
//! Card 0 is this process, card `i` the `i`th worker. A group is as good as its first fault; then a new one is made of
//! the cards that are left. Ranks of a group are its cards in order, this process first.

mod keys;
mod list;
mod offer;
mod serve;
mod tcp;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spanker_fabric::{Fabric, FabricError, inproc};
use spanker_llm::{Leader, LlmError};
use spanker_topology::{Bytes, Cluster, Profile, Shape};

use crate::content::Manifest;
use crate::error::{EngineError, Result};
use crate::model::Model;
pub use keys::{WorkerKey, new_key, read_key, write_key};
pub use list::{WorkerList, read_worker_list};
use offer::Offered;
pub(crate) use tcp::sessions;
pub use tcp::{
    LinkTimes, ListedWorker, WorkerEvent, WorkerOptions, WorkerServer, list_workers,
    worker_addresses,
};

/// Products in a second of a slow machine, and seconds that it is waited for at most.
const SLOW: f64 = 20e9;
const LONGEST: f64 = 60.0;
/// How often a worker that was given weights is asked whether they are safe, and how long it has between.
const ASKED: usize = 120;
const ASKED_AGAIN: Duration = Duration::from_millis(500);
/// The longest description of a worker.
const MOST_ABOUT: usize = 64 << 10;
/// Models of a worker's cache that it names.
const MOST_NAMED: usize = 32;

/// What a machine says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MachineInfo {
    /// Its name.
    pub name: String,
    /// Its version of this program.
    pub version: String,
    /// Its processor.
    pub processor: String,
    /// Its cores.
    pub cores: usize,
    /// Threads that it computes with.
    pub threads: usize,
    /// Bytes of memory that it may use.
    pub memory: u64,
    /// Whether it works for somebody.
    pub busy: bool,
    /// Models of which it has something.
    pub cached: Vec<CachedModel>,
}

/// A model of which a worker has something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedModel {
    /// What it was called.
    pub name: String,
    /// The beginning of its number.
    pub id: String,
    /// Bytes of the whole.
    pub length: u64,
    /// Bytes that are there.
    pub held: u64,
}

impl MachineInfo {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// What a machine says, with what cannot be shown left out.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<MachineInfo> {
        if bytes.len() > MOST_ABOUT {
            return None;
        }
        let mut info: MachineInfo = serde_json::from_slice(bytes).ok()?;
        for text in [&mut info.name, &mut info.version, &mut info.processor] {
            *text = crate::printable(text);
        }
        info.cached.truncate(MOST_NAMED);
        for model in &mut info.cached {
            (model.name, model.id) = (crate::printable(&model.name), crate::printable(&model.id));
        }
        let sound = (1..=4096).contains(&info.cores) && (1..=4096).contains(&info.threads);
        (sound && info.memory > 0).then_some(info)
    }
}

/// How long a step of a usual batch takes on a slow machine.
fn longest_step(model: &Model) -> Duration {
    let products = model.shape().parameters() as f64 * spanker_plan::USUAL_BATCH as f64;
    Duration::from_secs_f64((products / SLOW).min(LONGEST))
}

/// Why there is no group.
#[derive(Debug)]
pub(crate) enum Unreached {
    /// These workers did not answer, and why.
    Missing(Vec<(usize, String)>),
    /// One answered, and does not work for this process.
    Refused(EngineError),
}

/// What some workers say of themselves.
type Answers = Vec<(usize, MachineInfo)>;

/// How a leader reaches its workers. Cards are numbered from 1 here.
pub(crate) trait Sessions: Send + Sync {
    /// What people call them, this process first.
    fn names(&self) -> Vec<String>;

    /// A group of this process and these workers, which are its ranks in order.
    fn connect(&self, cards: &[usize]) -> Result<Box<dyn Fabric>, Unreached>;

    /// What those of some workers say that answer and work for nobody, in order.
    fn answering(&self, among: &[usize]) -> Answers;
}

/// The workers of a run, and those in the present group.
pub(crate) struct Group {
    sessions: Arc<dyn Sessions>,
    /// Whether somebody has said how long a machine may show no progress.
    is_given: bool,
    names: Vec<String>,
    /// The cards of the present group, by rank.
    members: RefCell<Vec<usize>>,
    /// Workers that did not answer when they were last asked.
    absent: RefCell<BTreeSet<usize>>,
    /// What workers said of themselves.
    about: RefCell<Vec<Option<MachineInfo>>>,
    /// What was measured of each card.
    profiles: RefCell<BTreeMap<usize, Profile>>,
    /// The model that was offered last.
    offered: RefCell<Option<Offered>>,
    /// The bytes of its file that each card needed last.
    needed: RefCell<BTreeMap<usize, Vec<Range<u64>>>>,
    /// Looks whether workers that were lost are there again.
    scout: RefCell<Option<JoinHandle<Answers>>>,
}

impl Group {
    /// Workers that are reached in this way. What nobody has said how long it may take, a large model has longer for.
    pub(crate) fn new(sessions: Arc<dyn Sessions>, is_given: bool) -> Group {
        let names = sessions.names();
        let about = RefCell::new(vec![None; names.len()]);
        Group {
            sessions,
            is_given,
            names,
            members: RefCell::default(),
            absent: RefCell::default(),
            about,
            profiles: RefCell::default(),
            offered: RefCell::default(),
            needed: RefCell::default(),
            scout: RefCell::default(),
        }
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    /// Whether all of these cards are in the present group.
    pub(crate) fn has(&self, cards: &[usize]) -> bool {
        let members = self.members.borrow();
        cards.iter().all(|card| members.contains(card))
    }

    pub(crate) fn ranks_of(&self, cards: &[usize]) -> Vec<usize> {
        let members = self.members.borrow();
        let rank = |card: &usize| members.iter().position(|member| member == card);
        cards.iter().map(|card| rank(card).unwrap_or(usize::MAX)).collect()
    }

    /// What a worker computes with, as it said: measurements of another machine at its address are not its own.
    pub(crate) fn computes_with(&self, card: usize) -> String {
        let about = self.about.borrow();
        let info = about.get(card).and_then(Option::as_ref);
        info.map_or_else(String::new, |info| {
            let MachineInfo { processor, threads, version, .. } = info;
            format!("{processor}, {threads} threads, {version}")
        })
    }

    /// Writes what is known of a machine into its profile.
    pub(crate) fn describe(&self, card: usize, profile: &mut Profile) {
        let about = self.about.borrow();
        let memory = match (card, about.get(card).and_then(Option::as_ref)) {
            (0, _) => crate::memory::of_machine(),
            (_, Some(info)) => info.memory,
            (_, None) => return,
        };
        profile.memory.capacity.value = Bytes(memory);
        profile.memory.capacity.source = "what the machine says".into();
        profile.name = if card == 0 { "this-machine".into() } else { self.names[card].clone() };
    }

    /// Remembers what a card takes.
    pub(crate) fn learn(&self, card: usize, profile: &Profile) {
        self.profiles.borrow_mut().insert(card, profile.clone());
    }

    /// These cards, if it is known what each of them takes.
    pub(crate) fn known(&self, cards: &[usize]) -> Result<Option<Cluster>> {
        let profiles = self.profiles.borrow();
        let known: Option<Vec<Profile>> =
            cards.iter().map(|card| profiles.get(card).cloned()).collect();
        let cluster = known.map(|profiles| Cluster::new(profiles, Shape::Switch)).transpose();
        cluster.map_err(|error| EngineError::cluster(&error))
    }

    /// A model as it is offered.
    fn offered(&self, model: &Model, timeout: Duration) -> Offered {
        let mut offered = self.offered.borrow_mut();
        let network = Arc::clone(model.network());
        let known = offered.as_ref().filter(|known| Arc::ptr_eq(&known.network, &network));
        let manifest = match known {
            Some(known) => Arc::clone(&known.manifest),
            None => {
                // What cards needed was of another file.
                self.needed.borrow_mut().clear();
                Arc::new(Manifest::of_file(model.path(), network.bytes()))
            }
        };
        let path = model.path().to_path_buf();
        offered.insert(Offered { path, network, manifest, timeout }).clone()
    }

    /// Remembers which bytes of the offered model's file a card needs.
    pub(crate) fn need(&self, card: usize, ranges: Vec<Range<u64>>) {
        self.needed.borrow_mut().insert(card, ranges);
    }

    /// Makes a group of these cards, of which this process is one in any case, for a model.
    pub(crate) fn gather(
        &self,
        cards: &[usize],
        model: &Model,
        timeout: Duration,
    ) -> Result<Leader<'static>> {
        let timeout = if self.is_given { timeout } else { timeout.max(longest_step(model)) };
        let workers: Vec<usize> = cards.iter().copied().filter(|&card| card > 0).collect();
        self.members.borrow_mut().clear();
        // Before anybody waits for it.
        let offered = (!workers.is_empty()).then(|| self.offered(model, timeout));
        let mut fabric = match workers[..] {
            [] => Box::new(inproc::group(1).remove(0)) as Box<dyn Fabric>,
            _ => self.sessions.connect(&workers).map_err(|why| self.unreached(why))?,
        };
        *self.members.borrow_mut() = std::iter::once(0).chain(workers.iter().copied()).collect();
        for (card, info) in self.sessions.answering(&workers) {
            self.about.borrow_mut()[card] = Some(info);
        }
        if let Some(offered) = offered
            && let Err(fault) = offer::offer(&mut *fabric, &offered)
        {
            let lost = self.blamed(&fault);
            self.absent.borrow_mut().extend(lost);
            let error = self.explain(fault);
            self.members.borrow_mut().clear();
            return Err(error);
        }
        self.absent.borrow_mut().retain(|card| !workers.contains(card));
        Ok(Leader::owning(fabric, timeout)?.supplying())
    }

    fn explain(&self, fault: FabricError) -> EngineError {
        let names = self.names_in(&LlmError::Fabric(fault.clone()));
        let names = names.map_or_else(String::new, |names| format!(" ({names})"));
        EngineError::unavailable(format!("{fault}{names}"), None)
    }

    fn unreached(&self, why: Unreached) -> EngineError {
        let missing = match why {
            Unreached::Refused(error) => return error,
            Unreached::Missing(missing) => missing,
        };
        self.absent.borrow_mut().extend(missing.iter().map(|(card, _)| *card));
        let words =
            missing.iter().map(|(card, why)| format!("worker {}: {why}", self.names[*card]));
        let hint = "'spanker workers' shows which answer; leave out of --workers what is not there";
        EngineError::unavailable(words.collect::<Vec<_>>().join("; "), Some(hint.into()))
    }

    /// The worker that a fault is about.
    fn blamed(&self, fault: &FabricError) -> Option<usize> {
        let (first, second) = match *fault {
            FabricError::Died { rank }
            | FabricError::Failed { rank, .. }
            | FabricError::Refused { rank, .. } => (rank, rank),
            FabricError::Deadline { rank, peer, .. }
            | FabricError::Lost { rank, peer }
            | FabricError::Corrupt { rank, peer }
            | FabricError::Length { rank, peer, .. }
            | FabricError::Mismatch { rank, peer, .. } => (peer, rank),
            _ => return None,
        };
        // This process knows that it is there.
        let rank = if first == 0 { second } else { first };
        self.members.borrow().get(rank).copied().filter(|&card| card > 0)
    }

    /// The cards that can go on after a fault: all but the one that it is about, or where somebody was waited for in vain,
    /// but those that do not answer.
    pub(crate) fn survivors(&self, fault: &FabricError, left: &[usize]) -> Option<Vec<usize>> {
        match fault {
            // What one worker cannot hold or do, the others may.
            FabricError::Refused { rank, .. } if *rank > 0 => {}
            FabricError::Refused { .. }
            | FabricError::Mismatch { .. }
            | FabricError::Length { .. } => return None,
            _ => {}
        }
        let mut lost: Vec<usize> = self.blamed(fault).into_iter().collect();
        if matches!(fault, FabricError::Deadline { .. }) {
            // Who waited in vain may itself be waited for by the one that noticed first: those that do not answer are it.
            let workers: Vec<usize> = left.iter().copied().filter(|&card| card > 0).collect();
            let there = self.sessions.answering(&workers);
            let answers = |card: &usize| there.iter().any(|(other, _)| other == card);
            let silent: Vec<usize> = workers.into_iter().filter(|card| !answers(card)).collect();
            lost = if silent.is_empty() { lost } else { silent };
        }
        let mut absent = self.absent.borrow_mut();
        absent.extend(lost);
        Some(left.iter().copied().filter(|card| !absent.contains(card)).collect())
    }

    /// Whether a worker of these did not answer when a group was made.
    pub(crate) fn lacks_one(&self, left: &[usize]) -> bool {
        let absent = self.absent.borrow();
        left.iter().any(|card| absent.contains(card))
    }

    /// The cards that can work now, if there are more of them than these. Workers are asked on a thread of its own, as one
    /// that is gone takes long not to answer: what is found is known to a later call. The same thread gives a worker that
    /// is back what it lacks of the model, over a connection of its own, while the others go on: a group that waits
    /// for weights makes no tokens.
    pub(crate) fn returned(&self, left: &[usize]) -> Option<Vec<usize>> {
        let mut scout = self.scout.borrow_mut();
        let Some(thread) = scout.take_if(|thread| thread.is_finished()) else {
            if scout.is_none() {
                let missing = (1..self.names.len()).filter(|card| !left.contains(card));
                let missing: Vec<usize> = missing.collect();
                let (sessions, offered) = (self.sessions.clone(), self.offered.borrow().clone());
                let needed = self.needed.borrow().clone();
                let look = move || {
                    let back = sessions.answering(&missing);
                    let mut is_given = false;
                    let of = |card: &usize| offered.as_ref().zip(needed.get(card));
                    for (card, _) in back.iter().filter(|(_, info)| !info.busy) {
                        if let Some((offered, needed)) = of(card) {
                            // Whoever could not be given it now is when the group is made, or found to be gone.
                            let _ = prefetch(&*sessions, *card, offered, needed);
                            is_given = true;
                        }
                    }
                    // That may have taken long, and a worker is busy until what it got is safe.
                    for _ in 0..if is_given { ASKED } else { 0 } {
                        let now = sessions.answering(&missing);
                        if now.iter().all(|(_, info)| !info.busy) {
                            return now;
                        }
                        std::thread::sleep(ASKED_AGAIN);
                    }
                    if is_given { sessions.answering(&missing) } else { back }
                };
                *scout = std::thread::Builder::new().name("spanker-scout".into()).spawn(look).ok();
            }
            return None;
        };
        let back = thread.join().unwrap_or_default();
        let free = back.iter().filter(|(_, info)| !info.busy).map(|(card, _)| *card);
        let back: BTreeSet<usize> = free.collect();
        self.absent.borrow_mut().retain(|card| !back.contains(card));
        let is_here = |card: &usize| left.contains(card) || back.contains(card);
        let well: Vec<usize> = (0..self.names.len()).filter(is_here).collect();
        (well.len() > left.len()).then_some(well)
    }

    /// Which workers an error is about, by name.
    pub(crate) fn names_in(&self, error: &LlmError) -> Option<String> {
        let members = self.members.borrow();
        let ranks = match error {
            LlmError::Fabric(
                FabricError::Died { rank }
                | FabricError::Failed { rank, .. }
                | FabricError::Refused { rank, .. },
            ) => vec![*rank],
            LlmError::Fabric(
                FabricError::Deadline { rank, peer, .. }
                | FabricError::Lost { rank, peer }
                | FabricError::Corrupt { rank, peer }
                | FabricError::Length { rank, peer, .. }
                | FabricError::Mismatch { rank, peer, .. },
            ) => vec![*rank, *peer],
            LlmError::Device(error) => vec![error.card()?],
            _ => return None,
        };
        let named = ranks.iter().filter(|&&rank| rank > 0);
        let named = named.filter_map(|&rank| Some((rank, *members.get(rank)?)));
        let words = named.map(|(rank, card)| format!("rank {rank} is worker {}", self.names[card]));
        let words: Vec<String> = words.collect();
        (!words.is_empty()).then(|| words.join(", "))
    }
}

/// Gives a worker that is in no group what it lacks of a model.
fn prefetch(
    sessions: &dyn Sessions,
    card: usize,
    offered: &Offered,
    needed: &[Range<u64>],
) -> Result<()> {
    let gone = |_| EngineError::unavailable("the worker is gone again", None);
    let mut fabric = sessions.connect(&[card]).map_err(gone)?;
    offer::offer(&mut *fabric, offered).map_err(LlmError::from)?;
    let mut leader = Leader::owning(fabric, offered.timeout)?.supplying();
    Ok(leader.prefetch(offered.network.bytes(), needed, &mut |_, _| {})?)
}

#[cfg(test)]
mod tests;
