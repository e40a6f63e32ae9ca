// SPDX-License-Identifier: Apache-2.0
//! A place to run: threads of this process, cards behind the ABI, GPUs, or ranks that a launcher has started. A host
//! knows its cards, what they take for a model, how to get a model onto them, and who is left after an error.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use spanker_llm::{AuditLog, LlmError, MemoryUse, Recorder, Runner, check_plan};
use spanker_plan::{Layout, Mark, Plan, Request};
use spanker_topology::Cluster;

use crate::cards::Cards;
use crate::directory::CardList;
use crate::error::{EngineError, Result};
use crate::gpus::Gpus;
use crate::layout::{self, Split, Wish};
use crate::model::Model;
use crate::profiles::Freshness;
use crate::ranks::{RankPlace, Ranks};
use crate::threads::Threads;
use crate::workers::{self, Group, WorkerKey};

/// The most cards that can be threads, or logical cards of a GPU.
const MOST_CARDS: usize = 256;
/// How long a machine may show no progress where nobody says.
const WORKER_TIMEOUT: Duration = Duration::from_secs(5);
/// The most threads that make sense.
const MOST_THREADS: usize = 1024;

/// What happens while a host works, for whoever watches.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Cards are measured, with so many rows of a prompt next.
    Measuring {
        /// Rows of a step.
        rows: usize,
    },
    /// GPUs are measured.
    MeasuringGpus,
    /// Weights are on their way to the cards.
    Loading {
        /// Bytes that are there.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// Tokens of a prompt are run, in several pieces.
    Prompt {
        /// Tokens that were run.
        done: usize,
        /// Tokens in all.
        total: usize,
    },
    /// What was measured, loaded or read is complete.
    Done,
    /// A card was lost; the run goes on with these.
    Lost {
        /// Why.
        error: &'a LlmError,
        /// The devices' numbers of the cards that are left.
        left: &'a [usize],
    },
    /// The run goes on, on another layout.
    Resumed {
        /// What it runs by.
        plan: &'a Plan,
        /// How long nothing was computed.
        after: Duration,
        /// Tokens that were computed again.
        tokens: usize,
    },
    /// Something worth knowing.
    Note(&'a str),
}

/// Who gets events.
pub(crate) type Observer = Arc<Watch>;

/// What is called with events, from any thread.
pub(crate) type Watch = dyn Fn(&Event<'_>) + Send + Sync;

/// A model on cards.
pub(crate) struct Loaded<'h> {
    pub(crate) runner: Box<dyn Runner + 'h>,
    pub(crate) memory: Vec<MemoryUse>,
}

/// How a model is brought onto cards.
pub(crate) struct Load<'a> {
    pub(crate) model: &'a Model,
    pub(crate) plan: &'a Plan,
    /// What cards do is recorded here.
    pub(crate) recorder: Option<&'a Recorder>,
    /// What is checked of what they compute is counted here. The part is that of the plan's request.
    pub(crate) log: &'a AuditLog,
    pub(crate) observer: &'a Watch,
}

/// Cards of one kind.
pub(crate) trait Backend {
    /// What they are.
    fn fabric(&self) -> Fabric;

    /// The devices' numbers.
    fn indices(&self) -> Vec<usize>;

    /// Threads that a card's work is shared by, where cards are on this host's processor.
    fn threads(&self) -> usize;

    /// What the first `cards` of these take for a model in this layout, and the links between them.
    fn cluster(
        &self,
        model: &Model,
        request: &Request,
        layout: &Layout,
        freshness: Freshness,
        observer: &Watch,
    ) -> Result<Cluster>;

    /// Whether what they take depends on the layout, so that it is measured for each.
    fn measures_layouts(&self) -> bool;

    /// Brings a model onto these cards, whose numbers are in `left`.
    fn load<'h>(&'h self, left: &[usize], load: &Load<'_>) -> Result<Loaded<'h>, LlmError>;

    /// The plan for the cards that are left after a loss.
    fn replan(&self, _left: &[usize], _model: &Model, _request: Request) -> Result<Plan> {
        Err(EngineError::unavailable("no cards are left", None))
    }

    /// The cards of `left` that can go on after an error, if it was a card's or a link's fault.
    fn survivors(&self, _error: &LlmError, _left: &[usize]) -> Option<Vec<usize>> {
        None
    }

    /// The cards of the whole host that can work now, if there are more of them than these.
    fn returned(&self, _left: &[usize]) -> Option<Vec<usize>> {
        None
    }

    /// Whether one of these does not answer any more.
    fn lack_one(&self, _left: &[usize]) -> bool {
        false
    }

    /// What a step would fail with if one of these has gone, where that can be found out without a step: what is found is
    /// known to a later call.
    fn missed(&self, _left: &[usize]) -> Option<LlmError> {
        None
    }

    /// An error with what it means for these cards.
    fn explain(&self, error: LlmError) -> EngineError {
        error.into()
    }

    /// Which machines an error of ranks is about.
    fn names(&self, _error: &LlmError) -> Option<String> {
        None
    }

    /// What cards did that record it themselves, since the model was loaded.
    fn marks(&self) -> Result<Option<Vec<Mark>>> {
        Ok(None)
    }

    /// The ranks, where cards are ranks.
    fn ranks(&self) -> Option<&Ranks> {
        None
    }

    /// The GPUs, where cards are GPUs.
    fn gpus(&self) -> Option<&Gpus> {
        None
    }
}

/// What cards are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fabric {
    /// Threads of this process.
    Inproc,
    /// Cards behind the ABI: real ones, or a twin's.
    Cards,
    /// NVIDIA's GPUs.
    Cuda,
    /// Processes that a launcher has started.
    Mpi,
    /// This machine and workers of others, over TCP.
    Tcp,
}

impl Fabric {
    /// Every fabric.
    pub const ALL: [Fabric; 5] =
        [Fabric::Inproc, Fabric::Cards, Fabric::Cuda, Fabric::Mpi, Fabric::Tcp];

    /// In a word, as flags have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Fabric::Inproc => "inproc",
            Fabric::Cards => "cards",
            Fabric::Cuda => "cuda",
            Fabric::Mpi => "mpi",
            Fabric::Tcp => "tcp",
        }
    }

    /// Where cards are, in words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Fabric::Inproc => "in process",
            Fabric::Cards => "on cards",
            Fabric::Cuda => "on GPUs",
            Fabric::Mpi => "on ranks",
            Fabric::Tcp => "on workers",
        }
    }

    /// What part of the cards' work is computed again where nobody says: cards and GPUs can compute wrongly, threads of
    /// this process cannot.
    #[must_use]
    pub fn usual_audit(self) -> f64 {
        match self {
            Fabric::Cards | Fabric::Cuda => spanker_plan::USUAL_AUDIT,
            Fabric::Inproc | Fabric::Mpi | Fabric::Tcp => 0.0,
        }
    }
}

/// A place to run models.
///
/// ```no_run
/// use spanker_engine::{Engine, Host, Limits, Sampling, Wish, request};
///
/// # fn main() -> Result<(), spanker_engine::EngineError> {
/// let host = Host::threads(2, 1)?; // or cards, gpus, ranks
/// let model = host.open("smollm2-135m.gguf")?;
/// let prompt = model.encode("Once upon a time", true, 2048)?;
/// let plan = host.plan(&model, &request(2048, 128, prompt.len(), 64), &Wish::default())?;
/// let mut engine = Engine::load(&host, &model, plan)?;
/// for piece in engine.generate(&prompt, Sampling::greedy(), Limits::tokens(64))? {
///     print!("{}", piece?.text); // a lost card costs time here, nothing else
/// }
/// # Ok(())
/// # }
/// ```
pub struct Host {
    backend: Box<dyn Backend>,
    observer: Observer,
    /// Cards that are used at most.
    most: usize,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (fabric, cards) = (self.fabric(), self.card_count());
        f.debug_struct("Host").field("fabric", &fabric).field("cards", &cards).finish()
    }
}

impl Host {
    fn of(backend: impl Backend + 'static) -> Host {
        Host { backend: Box::new(backend), observer: Arc::new(|_| {}), most: usize::MAX }
    }

    /// Cards that tests play.
    #[cfg(test)]
    pub(crate) fn test(backend: impl Backend + 'static) -> Host {
        Host::of(backend)
    }

    /// Cards that are threads of this process, `threads` in all, shared out over so many cards.
    ///
    /// # Errors
    /// [`EngineError::Request`] for numbers that make no sense.
    pub fn threads(threads: usize, cards: usize) -> Result<Host> {
        check_threads(threads)?;
        check_cards(cards, "can be threads")?;
        Ok(Host::of(Threads::new(threads, cards)))
    }

    /// Cards behind the ABI, in a folder of devices; [`crate::directory::find`] says where they usually are. `timeout`
    /// is how long they may show no progress before they are given up.
    ///
    /// # Errors
    /// [`EngineError::Unavailable`] if there are none or one does not answer, [`EngineError::Request`] for cards that
    /// do not exist.
    pub fn cards(
        folder: &Path,
        list: Option<&CardList>,
        timeout: Option<Duration>,
        threads: usize,
    ) -> Result<Host> {
        Ok(Host::of(Cards::open(folder, list, timeout, threads)?))
    }

    /// GPUs: as many as cards, or logical cards that share the first one.
    ///
    /// # Errors
    /// [`EngineError::Unavailable`] if there is no GPU, or this program was built without them.
    pub fn gpus(cards: usize) -> Result<Host> {
        check_cards(cards, "can share a GPU")?;
        Ok(Host::of(Gpus::open(cards)?))
    }

    /// This process as one of those that a launcher such as `mpirun` has started; each is a card. `threads` are those
    /// of each process; nothing shares the cores of a machine out over its processes.
    ///
    /// # Errors
    /// [`EngineError::Unavailable`] where there is no launcher, or this program was built without MPI.
    pub fn ranks(timeout: Option<Duration>, threads: Option<usize>) -> Result<Host> {
        threads.map_or(Ok(()), check_threads)?;
        Ok(Host::of(Ranks::start(timeout, threads)?))
    }

    /// Ranks of a fabric that the caller has connected.
    ///
    /// # Errors
    /// [`EngineError::Request`] for a number of threads that makes no sense.
    pub fn ranks_of(
        fabric: Box<dyn spanker_fabric::Fabric>,
        place: RankPlace,
        threads: usize,
    ) -> Result<Host> {
        check_threads(threads)?;
        Ok(Host::of(Ranks::of(fabric, place, threads)))
    }

    /// This machine and the workers at these addresses, each a card. They are reached when the first model is measured or
    /// loaded. `timeout` is how long a machine may show no progress before it is given up; `threads` are those of this
    /// one.
    ///
    /// # Errors
    /// [`EngineError::Request`] for numbers that make no sense.
    pub fn workers(
        addresses: Vec<String>,
        key: Option<WorkerKey>,
        timeout: Option<Duration>,
        threads: usize,
    ) -> Result<Host> {
        check_threads(threads)?;
        let is_given = timeout.is_some();
        let timeout = timeout.unwrap_or(WORKER_TIMEOUT);
        let group = Group::new(workers::sessions(addresses, key, timeout), is_given);
        Ok(Host::of(Ranks::of_workers(group, timeout, threads)))
    }

    /// Calls `observer` with what happens.
    #[must_use]
    pub fn observed(mut self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Host {
        self.observer = Arc::new(observer);
        self
    }

    /// Uses the first `count` cards alone; the others wait.
    ///
    /// # Errors
    /// [`EngineError::Request`] for none, or for more than there are.
    pub fn with_cards(self, count: usize) -> Result<Host> {
        match self.backend.indices().len() {
            cards if (1..=cards).contains(&count) => Ok(Host { most: count, ..self }),
            cards => Err(EngineError::request(format!(
                "--cards {count}: --fabric {} has {cards}",
                self.fabric().name()
            ))),
        }
    }

    /// What the cards are.
    #[must_use]
    pub fn fabric(&self) -> Fabric {
        self.backend.fabric()
    }

    /// How many cards there are.
    #[must_use]
    pub fn card_count(&self) -> usize {
        self.backend.indices().len().min(self.most)
    }

    /// Threads that share the work of cards on this processor.
    #[must_use]
    pub fn thread_count(&self) -> usize {
        self.backend.threads()
    }

    /// Whether this process leads: it plans and generates. Every process does but the ranks from 1 on.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.backend.ranks().is_none_or(Ranks::leads)
    }

    /// Where the ranks are, if the cards are ranks.
    #[must_use]
    pub fn rank_place(&self) -> Option<&RankPlace> {
        self.backend.ranks().map(Ranks::place)
    }

    /// The names of the machines that cards are, where each is one.
    #[must_use]
    pub fn machine_names(&self) -> Vec<String> {
        let mut names = self.rank_place().map_or_else(Vec::new, |place| place.hosts.clone());
        names.truncate(self.card_count());
        names
    }

    /// Opens a model. On ranks the leader is first, so that what is wrong everywhere is said once; the others hear
    /// that a rank could not open it.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Model> {
        self.open_with(|| Model::open(path))
    }

    /// The same for whoever has to look for the model first, or has it already.
    ///
    /// # Errors
    /// What `open` fails with.
    pub fn open_with<M>(&self, open: impl FnOnce() -> Result<M>) -> Result<M> {
        match self.backend.ranks() {
            Some(ranks) => ranks.open(open),
            None => open(),
        }
    }

    /// On ranks that do not lead: does what the leader says until that is done. `expected` is the plan that this rank
    /// has been given itself, if it has; another layout is refused. Anywhere else it returns at once.
    ///
    /// # Errors
    /// [`EngineError::Run`] with the group's fault.
    pub fn follow(&self, model: &Model, expected: Option<&Plan>) -> Result<()> {
        self.backend.ranks().map_or(Ok(()), |ranks| ranks.follow(model, expected))
    }

    /// On ranks: ends the group because of something that this process alone knows.
    pub fn give_up(&self, reason: &str) {
        if let Some(ranks) = self.backend.ranks() {
            ranks.give_up(reason);
        }
    }

    /// Whether this process is the one that tells people of an error which other ranks have as well.
    #[must_use]
    pub fn speaks_for(&self, error: &EngineError) -> bool {
        self.backend.ranks().is_none_or(|ranks| ranks.speaks_for(error))
    }

    /// Which part of the cards' work a plan's request has checked, and whether every step is computed twice, for a
    /// wished part of it.
    ///
    /// # Errors
    /// [`EngineError::Request`] for a part that these cards cannot have checked.
    pub fn audit(&self, wished: Option<f64>) -> Result<f64> {
        let fabric = self.fabric();
        match (fabric, wished.unwrap_or(fabric.usual_audit())) {
            (Fabric::Cards | Fabric::Cuda | Fabric::Mpi | Fabric::Tcp, part) => Ok(part),
            (Fabric::Inproc, 0.0) => Ok(0.0),
            (Fabric::Inproc, part) => Err(EngineError::request(format!(
                "--audit {part}: threads of this process are not checked"
            ))),
        }
    }

    /// The plan of a run: the layout that is wished for, or the planner's best that gives the bits of one card, with
    /// prices of what is here. Cards that are all alike are all used; others only where they help.
    ///
    /// # Errors
    /// [`EngineError::DoesNotFit`], [`EngineError::Request`], or what measuring fails with.
    pub fn plan(&self, model: &Model, request: &Request, wish: &Wish) -> Result<Plan> {
        let (shape, cards) = (model.shape(), self.card_count());
        if let Some(layout) = wish.layout(shape, cards)? {
            return self.plan_as(model, request, layout);
        }
        let usual = self.usual_layout(model, cards)?;
        if cards == 1 {
            return self.plan_as(model, request, usual);
        }
        let cluster = self.cluster(model, request, &usual, Freshness::Kept)?;
        let apart = matches!(self.fabric(), Fabric::Cards | Fabric::Tcp);
        let copies = self.fabric() == Fabric::Cards;
        let layout = layout::best(shape, &cluster, &self.taps(request), apart, copies)?;
        if self.backend.measures_layouts() && layout != usual {
            return self.plan_as(model, request, layout);
        }
        layout::fitting(
            Plan::new(shape.clone(), cluster, self.taps(request), layout)?,
            &self.backend.indices(),
        )
    }

    /// The plan of a layout, with prices of what is here.
    ///
    /// # Errors
    /// As [`Host::plan`].
    pub fn plan_as(&self, model: &Model, request: &Request, layout: Layout) -> Result<Plan> {
        let cluster = self.cluster(model, request, &layout, Freshness::Kept)?;
        let plan = Plan::new(model.shape().clone(), cluster, self.taps(request), layout)?;
        layout::fitting(plan, &self.backend.indices())
    }

    /// The plan of a layout whose steps are run and not timed: nothing is measured.
    ///
    /// # Errors
    /// As [`Host::plan`].
    pub fn plan_untimed(&self, model: &Model, request: &Request, layout: Layout) -> Result<Plan> {
        let cluster = self.cluster(model, request, &layout, Freshness::Assumed)?;
        let plan = Plan::new(model.shape().clone(), cluster, self.taps(request), layout)?;
        match self.fabric() {
            // Nothing is assumed of their memory.
            Fabric::Cards => layout::fitting(plan, &self.backend.indices()),
            _ => Ok(plan),
        }
    }

    /// A plan that was made before, with prices of what is here and for this request.
    ///
    /// # Errors
    /// [`EngineError::Run`] for a plan of another model or one that cannot be run; else as [`Host::plan`].
    pub fn plan_saved(&self, model: &Model, request: &Request, saved: &Plan) -> Result<Plan> {
        check_plan(model.network(), saved)?;
        let last = saved.layout.cards().last().map_or(0, |card| card + 1);
        if last > self.card_count() {
            let (cards, name) = (self.card_count(), self.fabric().name());
            let what = format!("the plan uses {last} cards, and --fabric {name} has {cards}");
            return Err(EngineError::request(what));
        }
        let request = Request { kv: saved.request.kv, ..request.clone() };
        self.plan_as(model, &request, saved.layout.clone())
    }

    /// What the cards take for a model in a layout.
    ///
    /// # Errors
    /// What measuring fails with.
    pub fn cluster(
        &self,
        model: &Model,
        request: &Request,
        layout: &Layout,
        freshness: Freshness,
    ) -> Result<Cluster> {
        self.backend.cluster(model, request, layout, freshness, &*self.observer)
    }

    /// The layout that cards are measured with before one is chosen.
    ///
    /// # Errors
    /// [`EngineError::Request`] if the model cannot be split over so many cards.
    pub fn usual_layout(&self, model: &Model, cards: usize) -> Result<Layout> {
        let shares = vec![1.0; cards];
        Split::Gather
            .layout(model.shape(), &shares)
            .or_else(|error| Split::Pipeline.layout(model.shape(), &shares).map_err(|_| error))
    }

    /// A runner of a plan, for whoever looks at steps themselves. The plan's cards are the first of this host's.
    ///
    /// # Errors
    /// What loading fails with.
    pub fn runner<'h>(&'h self, model: &Model, plan: &Plan) -> Result<Box<dyn Runner + 'h>> {
        let cards = plan.layout.cards().last().map_or(1, |card| card + 1);
        let indices = self.backend.indices();
        let left = indices.get(..cards).unwrap_or(&indices);
        let (log, observer) = (AuditLog::new(0.0), &*self.observer);
        let load = Load { model, plan, recorder: None, log: &log, observer };
        let loaded = self.backend.load(left, &load).map_err(|error| self.explain(error))?;
        Ok(loaded.runner)
    }

    /// Bytes that the first GPU reads in a second, where cards are GPUs.
    ///
    /// # Errors
    /// What measuring fails with.
    pub fn gpu_read_rate(&self) -> Result<Option<f64>> {
        self.backend.gpus().map(Gpus::read_rate).transpose()
    }

    /// An error with what it means for the cards.
    #[must_use]
    pub fn explain(&self, error: LlmError) -> EngineError {
        self.backend.explain(error)
    }

    /// The devices' numbers of the cards.
    #[must_use]
    pub fn indices(&self) -> Vec<usize> {
        let mut indices = self.backend.indices();
        indices.truncate(self.most);
        indices
    }

    /// On ranks: lets the others know that there is more to come. They lose timeout with a leader that is silent for
    /// its timeout.
    ///
    /// # Errors
    /// [`EngineError::Run`] if one does not answer.
    pub fn heartbeat(&self) -> Result<()> {
        Ok(self.backend.ranks().map_or(Ok(()), Ranks::heartbeat)?)
    }

    /// Says that cards were lost, and which they were.
    pub(crate) fn tell_lost(&self, error: &LlmError, left: &[usize]) {
        if let Some(names) = self.backend.names(error) {
            (self.observer)(&Event::Note(&names));
        }
        (self.observer)(&Event::Lost { error, left });
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub(crate) fn observer(&self) -> &Observer {
        &self.observer
    }

    /// The request with an audit only where cards can be checked.
    fn taps(&self, request: &Request) -> Request {
        match self.fabric() {
            Fabric::Cards | Fabric::Cuda | Fabric::Mpi | Fabric::Tcp => request.clone(),
            Fabric::Inproc => Request { audit: 0.0, ..request.clone() },
        }
    }
}

fn check_threads(threads: usize) -> Result<()> {
    match threads {
        1..=MOST_THREADS => Ok(()),
        _ => Err(EngineError::request(format!("--threads {threads}: from 1 to {MOST_THREADS}"))),
    }
}

fn check_cards(cards: usize, can: &str) -> Result<()> {
    match cards {
        1..=MOST_CARDS => Ok(()),
        _ => Err(EngineError::request(format!("--cards {cards}: from 1 to {MOST_CARDS} {can}"))),
    }
}
