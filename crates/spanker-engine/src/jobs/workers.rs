// SPDX-License-Identifier: Apache-2.0
//! The backends of a job, opened and measured before it begins, and what every output should be.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use spanker_fabric::device::{Deadline, DeviceErrorKind};
use spanker_llm::LlmError;
use spanker_runtime::SpankerControl;
use spanker_scheduler::survey;
use spanker_steal::{Backend, Capabilities, Cpu, Emulated, Failure, Fault, Faulty, Task, Trouble};

use super::backends::BackendKind;
use super::expected::{self, Expected};
use super::questions::Questions;
use super::request::{Inputs, PreparedJob};
use super::{CardProduct, JobError, JobWatch, Product, Replica, on_threads, speed};
use crate::directory;
use crate::error::{EngineError, Result};

/// How long a card may show no progress. The others have its items long before.
const DEADLINE: Deadline =
    Deadline { detect: Duration::from_secs(5), total: Duration::from_secs(3600), slow_after: None };
/// What to do about a card that is at work for another program.
const BUSY: &str = "'spanker cards' shows the process that has it";

/// Backends that are ready to work.
pub(super) struct Workers {
    pub(super) expected: Arc<Expected>,
    /// Which of the job's backends these are.
    places: Range<usize>,
    /// Those that compute, or pretend to, without faults.
    inner: Vec<Arc<dyn Backend>>,
    /// Items a second of one task of each.
    pub(super) rates: Vec<f64>,
}

impl Workers {
    /// Opens the backends at these places of a job's list, and measures how fast each is.
    pub(super) fn open(
        job: &PreparedJob,
        places: Range<usize>,
        watch: &JobWatch<'_>,
    ) -> Result<Workers> {
        let opening = Opening { job, places, watch };
        let workers = match &job.inputs {
            Inputs::Sleep => opening.sleep(),
            Inputs::Hash => opening.hash()?,
            Inputs::Matmul(product) => opening.multiply(product)?,
            Inputs::Prompts(questions, check) => opening.answer(questions, *check)?,
        };
        (watch.progress)("");
        watch.check()?;
        Ok(workers)
    }

    /// The backends with fresh faults. They count the tasks that they begin in `launches`.
    pub(super) fn with_faults(
        &self,
        job: &PreparedJob,
        launches: &Arc<AtomicUsize>,
    ) -> Result<Vec<Arc<dyn Backend>>> {
        let backend = |((place, inner), rate): ((usize, &Arc<dyn Backend>), &f64)| {
            let kind = job.kinds()[place];
            let (told, lanes) = (job.request.told, job.lanes(kind));
            let is_card = matches!(kind, BackendKind::Card { .. } | BackendKind::Gpu { .. });
            let capabilities = Capabilities {
                in_flight: lanes,
                rate: told.then_some(*rate),
                launch: (told && !is_card).then_some(job.launch(kind)),
                most_items: inner.capabilities().most_items,
                trusted: matches!(kind, BackendKind::Cpu { .. }),
            };
            let (inner, launches) = (Arc::clone(inner), Arc::clone(launches));
            let counted: Arc<dyn Backend> =
                Arc::new(Counted { id: kind.id(), capabilities, inner, launches });
            // A task hangs, and a backend does if a task of every lane does.
            let often = |fault: &Fault| match fault.trouble {
                Trouble::Hang(_) => vec![*fault; lanes],
                _ => vec![*fault],
            };
            let faults: Vec<_> = job.faults[place].iter().flat_map(often).collect();
            if faults.is_empty() {
                return Ok(counted);
            }
            let refused = |trouble| {
                EngineError::request(format!("threads cannot have the trouble {trouble:?}"))
            };
            Ok(Arc::new(Faulty::new(counted, faults).map_err(refused)?) as Arc<dyn Backend>)
        };
        self.places.clone().zip(&self.inner).zip(&self.rates).map(backend).collect()
    }
}

/// A backend with the id and the properties that a job gives it, whose tasks are counted.
struct Counted {
    id: &'static str,
    capabilities: Capabilities,
    inner: Arc<dyn Backend>,
    launches: Arc<AtomicUsize>,
}

impl Backend for Counted {
    fn id(&self) -> &'static str {
        self.id
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        self.launches.fetch_add(1, Ordering::Relaxed);
        self.inner.run(items, out)
    }

    fn submit(&self, task: Task) {
        self.launches.fetch_add(1, Ordering::Relaxed);
        self.inner.submit(task);
    }
}

/// Backends that are being opened.
struct Opening<'a> {
    job: &'a PreparedJob,
    places: Range<usize>,
    watch: &'a JobWatch<'a>,
}

impl Opening<'_> {
    fn kinds(&self) -> &[BackendKind] {
        &self.job.kinds()[self.places.clone()]
    }

    fn names(&self) -> &[String] {
        &self.job.names[self.places.clone()]
    }

    /// Threads of the processor that are at work together.
    fn threads(&self) -> usize {
        let cpus = self.kinds().iter().filter(|kind| matches!(kind, BackendKind::Cpu { .. }));
        cpus.map(|kind| kind.lanes()).sum()
    }

    /// Items a second of each backend, from those of a thread of `threads` alone and beside all others.
    fn rates(&self, threads: &dyn Backend) -> Result<Vec<f64>, JobError> {
        self.measuring("a thread");
        let rate = |tasks| speed::alone(threads, tasks, self.job.job.items(), self.job.bytes);
        let (count, base) = (self.threads(), rate(1)?);
        let thread = if count > 1 { rate(count)? } else { base };
        Ok(rates(self.kinds(), thread, base))
    }

    fn measuring(&self, name: &str) {
        (self.watch.progress)(&format!("measuring how fast {name} is .."));
    }

    fn workers(
        self,
        expected: Arc<Expected>,
        inner: Vec<Arc<dyn Backend>>,
        rates: Vec<f64>,
    ) -> Workers {
        Workers { expected, places: self.places, inner, rates }
    }

    /// All outputs, computed by as many threads as the machine has.
    fn table(
        &self,
        work: impl Fn(Range<usize>, &mut [u8]) -> Result<(), Failure> + Sync,
    ) -> Result<Arc<Expected>> {
        (self.watch.progress)("computing what every output should be ..");
        let (items, bytes) = (self.job.job.items(), self.job.bytes);
        let outputs = expected::all_of(items, bytes, self.watch.stop, work);
        let outputs = outputs.map_err(JobError::from)?.ok_or(JobError::Interrupted)?;
        Ok(Arc::new(Expected::Table { bytes, outputs }))
    }

    /// A backend that takes as long as it would, and knows the outputs.
    fn emulated(&self, kind: BackendKind, expected: &Arc<Expected>, rate: f64) -> Arc<dyn Backend> {
        let expected = Arc::clone(expected);
        let emulated = Emulated::new(rate, self.job.launch(kind), move |items, out: &mut [u8]| {
            expected.write(items, out);
            Ok(())
        });
        let heat = |emulated: Emulated<_>, (items, factor): &(Range<usize>, f64)| {
            emulated.hot(items.clone(), *factor)
        };
        Arc::new(self.job.hot.iter().fold(emulated, heat))
    }

    /// Everybody sleeps.
    fn sleep(self) -> Workers {
        let expected = Arc::new(Expected::Numbers);
        let rates = rates(self.kinds(), self.job.base, self.job.base);
        let pairs = self.kinds().iter().zip(&rates);
        let inner = pairs.map(|(kind, rate)| self.emulated(*kind, &expected, *rate)).collect();
        self.workers(expected, inner, rates)
    }

    /// Threads hash.
    fn hash(self) -> Result<Workers> {
        let work = |hot: Arc<expected::Hot>| {
            move |items: Range<usize>, out: &mut [u8]| {
                expected::hash(items, &hot, out);
                Ok(())
            }
        };
        let hot: Arc<expected::Hot> = self.job.hot.clone().into();
        let expected = self.table(work(Arc::clone(&hot)))?;
        let rates = self.rates(&Cpu::new(self.threads().max(1), work(Arc::new([]))))?;
        let inner = |(kind, rate): (&BackendKind, &f64)| match kind {
            BackendKind::Cpu { threads } => {
                Arc::new(Cpu::new(*threads, work(Arc::clone(&hot)))) as Arc<dyn Backend>
            }
            kind => self.emulated(*kind, &expected, *rate),
        };
        let inner = self.kinds().iter().zip(&rates).map(inner).collect();
        Ok(self.workers(expected, inner, rates))
    }

    /// Threads, cards and GPUs multiply.
    fn multiply(self, product: &Arc<Product>) -> Result<Workers> {
        let (items, bytes) = (self.job.job.items(), self.job.bytes);
        // Whoever is not there is told so at once.
        let found = |kind: &BackendKind| match kind {
            BackendKind::Card { index } => {
                let card = CardProduct::new(Arc::clone(product), open(*index)?, DEADLINE);
                let card = card.map_err(|error| refused(*index, &error))?;
                Ok(Some(Arc::new(card) as Arc<dyn Backend>))
            }
            BackendKind::Gpu { index } => on_gpu(product, *index).map(Some),
            _ => Ok(None),
        };
        let found: Vec<Option<_>> = self.kinds().iter().map(found).collect::<Result<_>>()?;
        let expected = self.table(|items, out| product.rows(items, out))?;
        let threads = on_threads(Arc::clone(product), self.threads().max(1));
        let mut rates = self.rates(threads.as_ref())?;
        let mut inner = Vec::new();
        for (place, (kind, device)) in self.kinds().iter().zip(found).enumerate() {
            inner.push(match (kind, device) {
                (BackendKind::Cpu { threads }, _) => on_threads(Arc::clone(product), *threads),
                (_, None) => self.emulated(*kind, &expected, rates[place]),
                (_, Some(device)) => {
                    let name = &self.names()[place];
                    self.measuring(name);
                    let rate = speed::alone(device.as_ref(), kind.lanes(), items, bytes);
                    rates[place] = rate.map_err(|failure| failed(name, &failure))?;
                    device
                }
            });
        }
        Ok(self.workers(expected, inner, rates))
    }

    /// Copies of a model answer.
    fn answer(self, questions: &Questions, check: bool) -> Result<Workers> {
        let (items, bytes) = (self.job.job.items(), self.job.bytes);
        let on_threads = |threads| Replica::in_process(Arc::clone(&questions.prompts), threads);
        let mut inner: Vec<Arc<dyn Backend>> = Vec::new();
        for (kind, name) in self.kinds().iter().zip(self.names()) {
            (self.watch.progress)(&format!("loading the model for {name} .."));
            inner.push(Arc::new(match *kind {
                BackendKind::Card { index } => {
                    let prompts = Arc::clone(&questions.prompts);
                    let replica = Replica::on_card(prompts, open(index)?, DEADLINE);
                    replica.map_err(|error| refused(index, &error))?
                }
                kind => on_threads(kind.lanes())?,
            }));
        }
        questions.touch();
        let mut rates = Vec::new();
        for (backend, name) in inner.iter().zip(self.names()) {
            self.watch.check()?;
            self.measuring(name);
            let rate = speed::of_one(backend.as_ref(), questions.typical(), bytes);
            rates.push(rate.map_err(|failure| failed(name, &failure))?);
        }
        if !check {
            return Ok(self.workers(Arc::new(Expected::Unknown), inner, rates));
        }
        (self.watch.progress)("computing what every answer should be ..");
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let alone = on_threads(cores)?;
        let mut outputs = vec![0; items * bytes];
        for (item, out) in outputs.chunks_exact_mut(bytes).enumerate() {
            self.watch.check()?;
            alone.run(item..item + 1, out).map_err(JobError::from)?;
        }
        let expected = Arc::new(Expected::Table { bytes, outputs });
        Ok(self.workers(expected, inner, rates))
    }
}

/// Items a second of one task of each backend, where a thread does so many and an emulated backend of 1x so many.
pub(super) fn rates(kinds: &[BackendKind], thread: f64, base: f64) -> Vec<f64> {
    let rate = |kind: &BackendKind| match kind {
        BackendKind::Cpu { .. } => thread,
        BackendKind::Emul { speed } => base * speed,
        BackendKind::Card { .. } | BackendKind::Gpu { .. } => base,
    };
    kinds.iter().map(rate).collect()
}

/// Opens a card of the folder where cards are looked for.
fn open(index: usize) -> Result<SpankerControl> {
    let folder = directory::find();
    let mut cards = survey(&folder);
    let unavailable = |what: String, hint: &str| EngineError::unavailable(what, Some(hint.into()));
    if cards.is_empty() {
        let what = format!("card:{index}: no cards at {}", directory::first(&folder).display());
        return Err(unavailable(what, directory::HINT));
    }
    if index >= cards.len() {
        let what = format!("card:{index}: there is no card {index} in {}", folder.display());
        return Err(unavailable(what, &format!("there are 0 to {}", cards.len() - 1)));
    }
    let card = cards.swap_remove(index);
    let reason = directory::reason(&card);
    match card.card {
        Ok(card) => Ok(card.control),
        Err(_) => {
            let what = format!("card {index} at {} is down: {reason}", card.path.display());
            let hint = "go on without it, or 'spanker cards' shows those that answer";
            Err(unavailable(what, hint))
        }
    }
}

/// A product on a GPU.
#[cfg(feature = "cuda")]
fn on_gpu(product: &Arc<Product>, index: usize) -> Result<Arc<dyn Backend>> {
    let gpu = super::GpuProduct::new(Arc::clone(product), index);
    let gpu =
        gpu.map_err(|error| EngineError::unavailable(format!("gpu:{index}: {error}"), None))?;
    Ok(Arc::new(gpu))
}

/// This build has none.
#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &Arc<Product>, index: usize) -> Result<Arc<dyn Backend>> {
    let what = format!("gpu:{index}: this spanker was built without CUDA");
    Err(EngineError::unavailable(what, None))
}

/// A card that cannot be a backend, with what to do.
fn refused(index: usize, error: &JobError) -> EngineError {
    let busy = matches!(error, JobError::Model(LlmError::Device(error))
        if error.kind() == DeviceErrorKind::Busy);
    named(&format_args!("card:{index}"), error, busy)
}

/// A backend that failed when it was first asked for something.
fn failed(name: &str, failure: &Failure) -> EngineError {
    named(&name, failure, !failure.is_lasting() && name.starts_with("card"))
}

fn named(name: &dyn Display, error: &dyn Display, busy: bool) -> EngineError {
    EngineError::unavailable(format!("{name}: {error}"), busy.then(|| BUSY.into()))
}
