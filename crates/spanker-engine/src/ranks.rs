// SPDX-License-Identifier: Apache-2.0
//! Cards that are ranks: each process opens its own copy of the file and plays one card. Rank 0 leads: it plans and
//! generates; the others do what it says. What they do together is in `spanker-llm`.

use std::cell::{RefCell, RefMut};
use std::time::{Duration, Instant};

use spanker_fabric::{Fabric as Wires, FabricError};
use spanker_llm::{Leader, LlmError, OnRanks, RankSamples, Subject, Twice, Worker, run_worker};
use spanker_plan::{Layout, Mark, Plan, Request};
use spanker_scheduler::DeviceErrorKind;
use spanker_topology::{Bytes, Cluster};

use crate::error::{EngineError, Result};
use crate::host::{Backend, Fabric, Load, Loaded, Watch};
use crate::layout::{self, Split};
use crate::model::Model;
use crate::profiles::{self, Freshness};
use crate::threads::{on_threads, uniform};

/// How long a rank waits for another where nobody says.
#[cfg(feature = "mpi")]
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long all may take to open their files.
const OPENING: Duration = Duration::from_secs(300);

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
        Ranks { leader: RefCell::new(None), fabric, rank, place, threads, speaks }
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
        let worker = Worker {
            network: model.network(),
            plan: expected,
            threads: self.threads,
            // The leader opens and measures before its first word.
            timeout: self.place.timeout,
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

    /// Lets the others know that there is more to come.
    pub(crate) fn heartbeat(&self) -> Result<(), LlmError> {
        self.leader()?.heartbeat()
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
            None => samples.insert(RankSamples::new(model.network(), &subject)?),
        };
        Ok(self.leader()?.measure_more(model.network(), &subject, samples, &mut |_| {})?)
    }
}

/// Tells the others why this rank cannot go on.
fn refuse(fabric: &mut dyn Wires, error: &EngineError) {
    let (rank, reason) = (fabric.rank(), error.to_string());
    fabric.abort(FabricError::Refused { rank, reason });
}

impl Backend for Ranks {
    fn fabric(&self) -> Fabric {
        Fabric::Mpi
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
        if freshness == Freshness::Assumed {
            return uniform(profiles::assumed(layout)?, layout);
        }
        let batch = profiles::measured_batch(request.batch as usize);
        let subject = self.subject(layout, batch);
        let key = profiles::key(model.shape(), layout, batch, self.threads);
        let key = format!("{key}; {} on {}", self.place.library, self.place.hosts.join(","));
        let mut is_fresh = false;
        let mut leader = self.leader()?;
        let network = model.network();
        let profile =
            profiles::kept(key.replace('\n', " "), freshness, observer, &mut |progress| {
                is_fresh = true;
                Ok(leader.measure(network, &subject, progress)?)
            })?;
        let profile = match is_fresh {
            true => profile,
            false => leader.refresh(network, &subject, profile)?,
        };
        uniform(profile, layout)
    }

    fn measures_layouts(&self) -> bool {
        true
    }

    fn load<'h>(&'h self, left: &[usize], load: &Load<'_>) -> Result<Loaded<'h>, LlmError> {
        let Load { model, plan, recorder, log, .. } = load;
        let (leader, network) = (self.leader()?, model.network());
        let space = (plan.request.context as usize, plan.request.batch as usize);
        let mut runner = OnRanks::lay_out(leader, network, plan, left, space, self.threads)?;
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
        let cluster = self.cluster(model, &request, &usual, Freshness::Kept, &|_| {})?;
        let layout = layout::best(model.shape(), &cluster, &request, false)?;
        let cluster = match layout == usual {
            true => cluster,
            false => self.cluster(model, &request, &layout, Freshness::Kept, &|_| {})?,
        };
        layout::fitting(Plan::new(model.shape().clone(), cluster, request, layout)?, left)
    }

    /// A rank that computes wrongly is left out; one that is gone takes the group with it.
    fn survivors(&self, error: &LlmError, left: &[usize]) -> Option<Vec<usize>> {
        let LlmError::Device(error) = error else { return None };
        let wrong = error.card().filter(|_| error.kind() == DeviceErrorKind::Wrong)?;
        let left: Vec<usize> = left.iter().copied().filter(|&rank| rank != wrong).collect();
        (!left.is_empty()).then_some(left)
    }

    fn marks(&self) -> Result<Option<Vec<Mark>>> {
        Ok(Some(self.leader()?.marks()?))
    }

    fn ranks(&self) -> Option<&Ranks> {
        Some(self)
    }
}
