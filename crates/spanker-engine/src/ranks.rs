// SPDX-License-Identifier: Apache-2.0
//! Cards that are ranks: processes that a launcher has started, each with its own copy of the file, or workers of other
//! machines, which get what they need of it. Rank 0 leads: it plans and generates; the others do what it says. What
//! they do together is in `spanker-llm`; how a group of workers comes about, and the next one after a fault, in
//! `workers.rs`.

use std::cell::{RefCell, RefMut};
use std::time::{Duration, Instant};

use spanker_fabric::{Fabric as Wires, FabricError};
use spanker_llm::{
    Leader, LlmError, OnRanks, RankSamples, Subject, Twice, Worker, needed_bytes, run_worker,
};
use spanker_plan::{Layout, Mark, Plan, Request};
use spanker_scheduler::DeviceErrorKind;
use spanker_topology::{Bytes, Cluster, Profile, Shape};

use crate::error::{EngineError, Result};
use crate::host::{Backend, Event, Fabric, Load, Loaded, Watch};
use crate::layout::{self, Split};
use crate::model::Model;
use crate::profiles::{self, Freshness};
use crate::threads::{on_threads, uniform};
use crate::workers::Group;

/// How long a rank waits for another where nobody says.
#[cfg(feature = "mpi")]
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long all may take to open their files.
const OPENING: Duration = Duration::from_secs(300);

/// What connects workers.
pub(crate) const TCP: &str = "TCP";

/// Where ranks are.
#[derive(Debug, Clone)]
pub struct RankPlace {
    /// The host of each rank.
    pub hosts: Vec<String>,
    /// The MPI, or what else connects them.
    pub library: String,
    /// Ranks on this rank's host.
    pub here: usize,
    /// How long ranks wait for each other.
    pub timeout: Duration,
}

impl RankPlace {
    /// In words.
    #[must_use]
    pub fn words(&self) -> String {
        let mut hosts = self.hosts.clone();
        hosts.sort_unstable();
        hosts.dedup();
        let (ranks, library) = (self.hosts.len(), &self.library);
        let many = |count: usize| if count == 1 { "" } else { "s" };
        let on = match &hosts[..] {
            [one] => format!("host {one}"),
            several => format!("{} hosts ({})", several.len(), several.join(", ")),
        };
        format!("{ranks} rank{} on {on}, {library}", many(ranks))
    }
}

/// This process as a rank.
pub(crate) struct Ranks {
    /// The leader's hold on the others, once its model is open.
    leader: RefCell<Option<Leader<'static>>>,
    /// The fabric, until the leader has it or the rank works.
    fabric: RefCell<Option<Box<dyn Wires>>>,
    rank: usize,
    place: RankPlace,
    threads: usize,
    /// Whether this rank tells people of a fault that all have: the lowest that lives.
    speaks: Box<dyn Fn() -> bool>,
    /// Where ranks are workers: how they are reached, and which of them are in the group.
    group: Option<Group>,
}

impl Ranks {
    /// Joins the ranks that a launcher has started.
    #[cfg(feature = "mpi")]
    pub(crate) fn start(timeout: Option<Duration>, threads: Option<usize>) -> Result<Ranks> {
        use spanker_fabric_mpi::World;
        let unavailable =
            |error: spanker_fabric_mpi::MpiError| EngineError::unavailable(error.to_string(), None);
        let world = World::start().map_err(unavailable)?;
        let hosts = world.hosts().to_vec();
        let here = hosts.iter().filter(|&host| *host == hosts[world.rank()]).count();
        let (library, timeout) = (world.library().to_owned(), timeout.unwrap_or(TIMEOUT));
        let place = RankPlace { hosts, library, here, timeout };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.unwrap_or((cores / here.max(1)).max(1));
        let fabric = world.fabric(OPENING).map_err(unavailable)?;
        let mut ranks = Ranks::of(Box::new(fabric), place, threads);
        ranks.speaks = Box::new(move || world.speaks());
        Ok(ranks)
    }

    /// There is no MPI in this program.
    #[cfg(not(feature = "mpi"))]
    pub(crate) fn start(_: Option<Duration>, _: Option<usize>) -> Result<Ranks> {
        let hint =
            "'scripts/with-mpi openmpi' (or mpich) builds target/mpi/spanker-openmpi, which has it";
        let what = "this spanker was built without MPI";
        Err(EngineError::Request { what: what.into(), hint: Some(hint.into()) })
    }

    /// Ranks of a fabric.
    pub(crate) fn of(fabric: Box<dyn Wires>, place: RankPlace, threads: usize) -> Ranks {
        let (rank, speaks) = (fabric.rank(), Box::new(move || true));
        let fabric = RefCell::new(Some(fabric));
        Ranks { leader: RefCell::new(None), fabric, rank, place, threads, speaks, group: None }
    }

    /// The leader of workers, which are connected when the first model is measured or loaded.
    pub(crate) fn of_workers(group: Group, timeout: Duration, threads: usize) -> Ranks {
        let hosts = group.names();
        let place = RankPlace { hosts, library: TCP.into(), here: 1, timeout };
        let (leader, fabric, speaks) = (RefCell::new(None), RefCell::new(None), Box::new(|| true));
        Ranks { leader, fabric, rank: 0, place, threads, speaks, group: Some(group) }
    }

    pub(crate) fn leads(&self) -> bool {
        self.rank == 0
    }

    pub(crate) fn place(&self) -> &RankPlace {
        &self.place
    }

    pub(crate) fn open<M>(&self, open: impl FnOnce() -> Result<M>) -> Result<M> {
        let Some(mut fabric) = self.fabric.take() else { return open() };
        if !self.leads() {
            fabric.barrier(Instant::now() + OPENING).map_err(LlmError::from)?;
            let model = open().inspect_err(|error| refuse(&mut *fabric, error));
            self.fabric.replace(Some(fabric));
            return model;
        }
        let model = open().inspect_err(|error| refuse(&mut *fabric, error))?;
        fabric.barrier(Instant::now() + OPENING).map_err(LlmError::from)?;
        self.leader.replace(Some(Leader::owning(fabric, self.place.timeout)?));
        Ok(model)
    }

    pub(crate) fn follow(&self, model: &Model, expected: Option<&Plan>) -> Result<()> {
        let Some(mut fabric) = self.fabric.take() else { return Ok(()) };
        let timeout = self.place.timeout;
        let worker = Worker {
            network: model.network(),
            store: None,
            plan: expected,
            threads: self.threads,
            // The leader opens and measures before its first word.
            timeout,
            order_timeout: timeout,
        };
        Ok(run_worker(&mut *fabric, &worker)?)
    }

    pub(crate) fn give_up(&self, reason: &str) {
        if let Ok(mut leader) = self.leader.try_borrow_mut()
            && let Some(leader) = &mut *leader
        {
            leader.give_up(reason);
        } else if let Some(fabric) = &mut *self.fabric.borrow_mut() {
            let (rank, reason) = (self.rank, reason.to_owned());
            fabric.abort(FabricError::Refused { rank, reason });
        }
    }

    /// Whether this rank is the one that tells of an error: the one that found it.
    pub(crate) fn speaks_for(&self, error: &EngineError) -> bool {
        let EngineError::Run(LlmError::Fabric(fault)) = error else { return true };
        match fault {
            FabricError::Died { rank: dead } => {
                self.rank == usize::from(*dead == 0) || (self.speaks)()
            }
            FabricError::Deadline { rank: found, .. }
            | FabricError::Mismatch { rank: found, .. }
            | FabricError::Length { rank: found, .. }
            | FabricError::Corrupt { rank: found, .. }
            | FabricError::Lost { rank: found, .. }
            | FabricError::Failed { rank: found, .. }
            | FabricError::Refused { rank: found, .. } => *found == self.rank,
            _ => (self.speaks)(),
        }
    }

    /// The hold on the other ranks, which one user has at a time.
    fn leader(&self) -> Result<RefMut<'_, Leader<'static>>, LlmError> {
        let busy = |what: &str| LlmError::Unsupported { what: what.to_owned() };
        let leader = self.leader.try_borrow_mut();
        let leader = leader.map_err(|_| busy("the ranks run another plan"))?;
        RefMut::filter_map(leader, Option::as_mut).map_err(|_| busy("the ranks have no leader yet"))
    }

    /// The hold on ranks of which these are some; workers become a group if they are none, or none that is sound.
    fn hold(&self, model: &Model, cards: &[usize]) -> Result<RefMut<'_, Leader<'static>>> {
        if let Some(group) = &self.group {
            let busy = |_| LlmError::Unsupported { what: "the workers run another plan".into() };
            let mut leader = self.leader.try_borrow_mut().map_err(busy)?;
            let is_sound = leader.as_ref().is_some_and(|leader| !leader.is_faulty());
            if !is_sound || !group.has(cards) {
                // Whoever is still in the last group hears that it is over.
                *leader = None;
                *leader = Some(group.gather(cards, model, self.place.timeout)?);
            }
        }
        Ok(self.leader()?)
    }

    /// The ranks of cards in the present group.
    fn ranks_of(&self, cards: &[usize]) -> Vec<usize> {
        self.group.as_ref().map_or_else(|| cards.to_vec(), |group| group.ranks_of(cards))
    }

    /// Lets the others know that there is more to come.
    pub(crate) fn heartbeat(&self) -> Result<(), LlmError> {
        if self.group.is_some() && self.leader.try_borrow().is_ok_and(|leader| leader.is_none()) {
            return Ok(());
        }
        self.leader()?.heartbeat()
    }

    /// Whether ranks are on machines that may differ.
    pub(crate) fn are_apart(&self) -> bool {
        self.group.is_some()
    }

    /// The cards of a layout, each with its profile: one for all, or one for each member.
    pub(crate) fn cluster_of(
        &self,
        mut profiles: Vec<Profile>,
        layout: &Layout,
        cards: &[usize],
    ) -> Result<Cluster> {
        let Some(group) = &self.group else { return uniform(profiles.remove(0), layout) };
        let members = layout.stages().flat_map(|stage| stage.group.cards.iter().copied());
        let members: Vec<usize> = members.collect();
        let count = layout.cards().last().map_or(1, |card| card + 1);
        let profile = |card: usize| {
            let member = members.iter().position(|&member| member == card).unwrap_or(0);
            let mut profile = profiles[member.min(profiles.len() - 1)].clone();
            let number = cards.get(card).copied().unwrap_or(card);
            group.describe(number, &mut profile);
            group.learn(number, &profile);
            profile
        };
        let profiles = (0..count).map(profile).collect();
        Cluster::new(profiles, Shape::Switch).map_err(|error| EngineError::cluster(&error))
    }

    /// What these cards take for a model in a layout.
    fn cluster_on(
        &self,
        cards: &[usize],
        model: &Model,
        (request, layout): (&Request, &Layout),
        freshness: Freshness,
        observer: &Watch,
    ) -> Result<Cluster> {
        if freshness == Freshness::Assumed {
            return self.cluster_of(vec![profiles::assumed(layout)?], layout, cards);
        }
        let batch = profiles::measured_batch(request.batch as usize);
        let subject = self.subject(layout, batch);
        let key = profiles::key(model.shape(), layout, batch, self.threads);
        let hosts: Vec<&str> = match &self.group {
            None => self.place.hosts.iter().map(String::as_str).collect(),
            Some(_) => cards.iter().map(|&card| &*self.place.hosts[card]).collect(),
        };
        let key = format!("{key}; {} on {}", self.place.library, hosts.join(","));
        let apart = self.are_apart();
        let count = if apart { layout.cards().len() } else { 1 };
        let mut leader = self.hold(model, cards)?;
        let machine = |at: usize| match &self.group {
            Some(group) => group.computes_with(cards[at]),
            None => String::new(),
        };
        let keys = (0..count).map(|at| match at {
            0 => key.replace('\n', " "),
            _ => format!("{}; {at} {}", key.replace('\n', " "), machine(at).replace('\n', " ")),
        });
        let keys: Vec<String> = keys.collect();
        // People who start something again wait for its first token.
        let mut is_fresh = self.are_apart() && profiles::are_recent(&keys);
        let network = model.network();
        let profiles = profiles::kept(keys.clone(), freshness, observer, &mut |progress| {
            is_fresh = true;
            let measured = leader.measure(network, &subject, apart, progress);
            measured.map_err(|error| self.explain(error))
        })?;
        let profiles = match is_fresh {
            true => profiles,
            false => {
                let refreshed = leader.refresh(network, &subject, apart, profiles);
                let refreshed = refreshed.map_err(|error| self.explain(error))?;
                if apart {
                    profiles::keep(keys, &refreshed);
                }
                refreshed
            }
        };
        self.cluster_of(profiles, layout, cards)
    }

    fn subject<'l>(&self, layout: &'l Layout, batch: usize) -> Subject<'l> {
        let cards = layout.cards().last().map_or(1, |card| card + 1);
        // Ranks of other hosts take nothing from this one's memory.
        let here = self.place.here.min(cards).max(1) as u64;
        let memory = Bytes(crate::memory::of_machine() / here * cards as u64);
        Subject { layout, batch, threads: self.threads, memory }
    }

    /// One more round of a measurement, which takes turns with what is measured besides.
    pub(crate) fn measure_more(
        &self,
        model: &Model,
        plan: &Plan,
        samples: &mut Option<RankSamples>,
    ) -> Result<()> {
        let batch = profiles::measured_batch(plan.request.batch as usize);
        let subject = self.subject(&plan.layout, batch);
        let samples = match samples {
            Some(samples) => samples,
            None => samples.insert(RankSamples::new(model.network(), &subject, self.are_apart())?),
        };
        let mut leader = self.hold(model, &self.indices())?;
        Ok(leader.measure_more(model.network(), &subject, samples, &mut |_| {})?)
    }
}

/// Tells the others why this rank cannot go on.
fn refuse(fabric: &mut dyn Wires, error: &EngineError) {
    let (rank, reason) = (fabric.rank(), error.to_string());
    fabric.abort(FabricError::Refused { rank, reason });
}

impl Backend for Ranks {
    fn fabric(&self) -> Fabric {
        if self.group.is_some() { Fabric::Tcp } else { Fabric::Mpi }
    }

    fn indices(&self) -> Vec<usize> {
        (0..self.place.hosts.len()).collect()
    }

    fn threads(&self) -> usize {
        self.threads
    }

    /// Measured on the ranks themselves while the others compute, too.
    fn cluster(
        &self,
        model: &Model,
        request: &Request,
        layout: &Layout,
        freshness: Freshness,
        observer: &Watch,
    ) -> Result<Cluster> {
        let cards = self.indices();
        self.cluster_on(&cards, model, (request, layout), freshness, observer)
    }

    fn measures_layouts(&self) -> bool {
        true
    }

    fn load<'h>(&'h self, left: &[usize], load: &Load<'_>) -> Result<Loaded<'h>, LlmError> {
        let Load { model, plan, recorder, log, observer } = load;
        let network = model.network();
        let leader = self.hold(model, left).map_err(|error| match error {
            EngineError::Run(error) => error,
            other => LlmError::Unsupported { what: other.to_string() },
        })?;
        let space = (plan.request.context as usize, plan.request.batch as usize);
        let ranks = self.ranks_of(left);
        if let Some(group) = &self.group {
            for (at, needed) in needed_bytes(network, plan, space)? {
                left.get(at).into_iter().for_each(|&card| group.need(card, needed.clone()));
            }
        }
        let mut is_sent = false;
        let mut progress = |done, total| {
            is_sent = true;
            observer(&Event::Loading { done, total });
        };
        let runner =
            OnRanks::lay_out(leader, network, plan, &ranks, space, self.threads, &mut progress);
        if is_sent {
            observer(&Event::Done);
        }
        let mut runner = runner?;
        let memory = runner.memory().to_vec();
        if recorder.is_some() {
            runner.record()?;
        }
        let audit = plan.request.audit;
        if audit > 0.0 {
            runner.audit(network, plan, log)?;
        }
        if audit < 1.0 {
            return Ok(Loaded { runner: Box::new(runner), memory });
        }
        let host = on_threads(model, plan, self.threads)?;
        let twice = Twice::new(Box::new(runner), Box::new(host));
        Ok(Loaded { runner: Box::new(twice), memory })
    }

    fn replan(&self, left: &[usize], model: &Model, request: Request) -> Result<Plan> {
        let shares = vec![1.0; left.len()];
        let usual = Split::Gather.layout(model.shape(), &shares);
        let usual = usual.or_else(|_| Split::Pipeline.layout(model.shape(), &shares))?;
        if self.group.is_some() {
            // Whoever does not answer is found before a plan is made for it.
            drop(self.hold(model, left)?);
        }
        // What is known of machines by now will do: whoever waits for an answer does not wait for a measurement.
        let known = match &self.group {
            Some(group) => group.known(left)?,
            None => None,
        };
        let cluster_of = |layout: &Layout| match &known {
            Some(cluster) => Ok(cluster.clone()),
            None => {
                let asked = (&request, layout);
                self.cluster_on(left, model, asked, Freshness::Kept, &|_| {})
            }
        };
        let cluster = cluster_of(&usual)?;
        let layout = layout::best(model.shape(), &cluster, &request, self.are_apart(), false)?;
        let cluster = if layout == usual { cluster } else { cluster_of(&layout)? };
        layout::fitting(Plan::new(model.shape().clone(), cluster, request, layout)?, left)
    }

    /// A rank that computes wrongly is left out. A process that is gone takes the group that a launcher has started with
    /// it; workers that are left make a new one.
    fn survivors(&self, error: &LlmError, left: &[usize]) -> Option<Vec<usize>> {
        let left = match (error, &self.group) {
            (LlmError::Device(error), _) => {
                let wrong = error.card().filter(|_| error.kind() == DeviceErrorKind::Wrong)?;
                // Blamed by its rank.
                let ranks = self.ranks_of(left);
                let right = left.iter().zip(&ranks).filter(|(_, rank)| **rank != wrong);
                right.map(|(card, _)| *card).collect()
            }
            (LlmError::Fabric(fault), Some(group)) => group.survivors(fault, left)?,
            _ => return None,
        };
        (!left.is_empty()).then_some(left)
    }

    fn returned(&self, left: &[usize]) -> Option<Vec<usize>> {
        self.group.as_ref()?.returned(left)
    }

    fn lack_one(&self, left: &[usize]) -> bool {
        self.group.as_ref().is_some_and(|group| group.lacks_one(left))
    }

    /// Nobody is blamed by it: who does not answer is known.
    fn missed(&self, left: &[usize]) -> Option<LlmError> {
        let fault = || FabricError::Deadline { rank: 0, peer: 0, what: "for workers beside" };
        self.lack_one(left).then(|| fault().into())
    }

    fn names(&self, error: &LlmError) -> Option<String> {
        self.group.as_ref()?.names_in(error)
    }

    fn explain(&self, error: LlmError) -> EngineError {
        match self.names(&error) {
            Some(names) => {
                EngineError::Unavailable { what: format!("{error} ({names})"), hint: None }
            }
            None => error.into(),
        }
    }

    fn marks(&self) -> Result<Option<Vec<Mark>>> {
        Ok(Some(self.leader()?.marks()?))
    }

    fn ranks(&self) -> Option<&Ranks> {
        Some(self)
    }
}
