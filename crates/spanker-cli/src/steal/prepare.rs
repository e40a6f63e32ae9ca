// SPDX-License-Identifier: Apache-2.0
//! Before the start on real threads: what the items are, who does them, how fast who is, and what should come of it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use spanker_jobs::{Product, Replica, on_threads};
use spanker_steal::{Backend, Capabilities, Cpu, Emulated, Failure, Fault, Faulty, Task, Trouble};

use super::crew::Kind;
use super::live::Stop;
use super::material::Material;
use super::questions::Questions;
use super::work::{self, Work};
use super::{Setup, cards, gpu, speed};
use crate::{Interrupted, output};

/// A backend under the name and with the properties that it is given.
struct Station {
    id: &'static str,
    capabilities: Capabilities,
    inner: Arc<dyn Backend>,
    calls: Arc<AtomicUsize>,
}

impl Backend for Station {
    fn id(&self) -> &'static str {
        self.id
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.inner.run(items, out)
    }

    fn submit(&self, task: Task) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.inner.submit(task);
    }
}

/// What there is to do and who does it, before the start.
pub(super) struct Prepared {
    pub(super) work: Arc<Work>,
    /// Those who compute, or pretend to, without faults.
    inner: Vec<Arc<dyn Backend>>,
    /// Items a second of one task of each.
    pub(super) rates: Vec<f64>,
}

impl Prepared {
    /// Backends with fresh faults. They count the tasks that they begin in `calls`.
    pub(super) fn backends(
        &self,
        setup: &Setup,
        calls: &Arc<AtomicUsize>,
    ) -> anyhow::Result<Vec<Arc<dyn Backend>>> {
        let backend = |(place, kind): (usize, &Kind)| -> anyhow::Result<Arc<dyn Backend>> {
            let inner = Arc::clone(&self.inner[place]);
            let (lanes, launch) = (setup.lanes(*kind), setup.launch(*kind));
            let is_card = matches!(kind, Kind::Card { .. } | Kind::Gpu { .. });
            let capabilities = Capabilities {
                in_flight: lanes,
                rate: setup.told.then_some(self.rates[place]),
                launch: (setup.told && !is_card).then_some(launch),
                most_items: inner.capabilities().most_items,
                trusted: matches!(kind, Kind::Cpu { .. }),
            };
            let station = Station { id: kind.id(), capabilities, inner, calls: Arc::clone(calls) };
            // A task hangs, and a backend does if a task of every lane does.
            let often = |fault: &Fault| match fault.trouble {
                Trouble::Hang(_) => vec![*fault; lanes],
                _ => vec![*fault],
            };
            let faults: Vec<_> = setup.faults[place].iter().flat_map(often).collect();
            if faults.is_empty() {
                return Ok(Arc::new(station));
            }
            let faulty = Faulty::new(Arc::new(station), faults);
            let refused = |trouble| anyhow::anyhow!("threads cannot have the trouble {trouble:?}");
            Ok(Arc::new(faulty.map_err(refused)?))
        };
        setup.kinds.iter().enumerate().map(backend).collect()
    }
}

/// A backend that takes as long as it would, and knows the outputs.
fn emulated(setup: &Setup, kind: Kind, work: &Arc<Work>, rate: f64) -> Arc<dyn Backend> {
    let work = Arc::clone(work);
    let emulated = Emulated::new(rate, setup.launch(kind), move |items, out: &mut [u8]| {
        work.recall(items, out);
        Ok(())
    });
    let heat = |emulated: Emulated<_>, (items, factor): &(Range<usize>, f64)| {
        emulated.hot(items.clone(), *factor)
    };
    Arc::new(setup.hot.iter().fold(emulated, heat))
}

/// Everybody sleeps.
fn sleep(setup: &Setup) -> Prepared {
    let work = Arc::new(Work::Sleep);
    let rates = setup.rates(setup.base, setup.base);
    let pairs = setup.kinds.iter().zip(&rates);
    let inner = pairs.map(|(kind, rate)| emulated(setup, *kind, &work, *rate)).collect();
    Prepared { work, inner, rates }
}

/// Threads hash.
fn hash(setup: &Setup, stop: &Stop) -> anyhow::Result<Prepared> {
    setup.progress("computing what every output should be ..");
    let work = Work::hash(setup.job.items(), setup.hot.clone(), &|| stop.asked());
    let work = Arc::new(work.ok_or(Interrupted)?);
    setup.progress("measuring how fast a thread is ..");
    let base = work::hash_rate(1);
    let thread = if setup.threads > 1 { work::hash_rate(setup.threads) } else { base };
    let rates = setup.rates(thread, base);
    let inner = |(kind, rate): (&Kind, &f64)| -> Arc<dyn Backend> {
        let Kind::Cpu { threads } = kind else { return emulated(setup, *kind, &work, *rate) };
        let work = Arc::clone(&work);
        Arc::new(Cpu::new(*threads, move |items, out: &mut [u8]| {
            work.compute(items, out);
            Ok(())
        }))
    };
    let inner = setup.kinds.iter().zip(&rates).map(inner).collect();
    Ok(Prepared { work, inner, rates })
}

/// Threads and cards multiply.
fn multiply(setup: &Setup, product: &Arc<Product>, stop: &Stop) -> anyhow::Result<Prepared> {
    let (items, bytes) = (setup.job.items(), setup.material.bytes());
    // Whoever is not there is told so at once.
    let card = |kind: &Kind| match kind {
        Kind::Card { index } => cards::product(product, *index).map(Some),
        Kind::Gpu { index } => gpu::product(product, *index).map(Some),
        _ => Ok(None),
    };
    let found: Vec<Option<_>> = setup.kinds.iter().map(card).collect::<anyhow::Result<_>>()?;
    setup.progress("computing what every output should be ..");
    let reference =
        work::all_of(items, bytes, &|| stop.asked(), |items, out| product.rows(items, out))?
            .ok_or(Interrupted)?;
    let work = Arc::new(Work::Elsewhere { bytes, reference: Some(reference) });
    setup.progress("measuring how fast a thread is ..");
    let threads = on_threads(Arc::clone(product), setup.threads.max(1));
    let base = speed::alone(threads.as_ref(), 1, items, bytes)?;
    let thread = match setup.threads {
        0 | 1 => base,
        count => speed::alone(threads.as_ref(), count, items, bytes)?,
    };
    let mut rates = setup.rates(thread, base);
    let mut inner = Vec::new();
    for (place, (kind, card)) in setup.kinds.iter().zip(found).enumerate() {
        inner.push(match (kind, card) {
            (Kind::Cpu { threads }, _) => on_threads(Arc::clone(product), *threads),
            (_, None) => emulated(setup, *kind, &work, rates[place]),
            (_, Some(card)) => {
                let name = &setup.names[place];
                setup.progress(&format!("measuring how fast {name} is .."));
                let rate = speed::alone(card.as_ref(), setup.lanes(*kind), items, bytes);
                rates[place] = rate.map_err(|failure| cards::failed(name, &failure))?;
                card
            }
        });
    }
    Ok(Prepared { work, inner, rates })
}

/// Copies of a model answer.
fn answer(
    setup: &Setup,
    questions: &Questions,
    check: bool,
    stop: &Stop,
) -> anyhow::Result<Prepared> {
    let (items, bytes) = (setup.job.items(), setup.material.bytes());
    let on_threads = |threads| Replica::in_process(Arc::clone(&questions.prompts), threads);
    let mut inner: Vec<Arc<dyn Backend>> = Vec::new();
    for (kind, name) in setup.kinds.iter().zip(&setup.names) {
        setup.progress(&format!("loading the model for {name} .."));
        inner.push(match kind {
            Kind::Card { index } => cards::replica(questions, *index)?,
            kind => Arc::new(on_threads(kind.lanes())?),
        });
    }
    questions.touch();
    let mut rates = Vec::new();
    for (backend, name) in inner.iter().zip(&setup.names) {
        if stop.asked() {
            return Err(Interrupted.into());
        }
        setup.progress(&format!("measuring how fast {name} is .."));
        let rate = speed::of_one(backend.as_ref(), questions.typical(), bytes);
        rates.push(rate.map_err(|failure| cards::failed(name, &failure))?);
    }
    let mut reference = None;
    if check {
        setup.progress("computing what every answer should be ..");
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let alone = on_threads(cores)?;
        let mut all = vec![0; items * bytes];
        for (item, out) in all.chunks_exact_mut(bytes).enumerate() {
            if stop.asked() {
                return Err(Interrupted.into());
            }
            alone.run(item..item + 1, out)?;
        }
        reference = Some(all);
    }
    Ok(Prepared { work: Arc::new(Work::Elsewhere { bytes, reference }), inner, rates })
}

/// What the items are, who does them, and how fast who is.
pub(super) fn prepare(setup: &Setup, stop: &Stop) -> anyhow::Result<Prepared> {
    let prepared = match &setup.material {
        Material::Sleep => sleep(setup),
        Material::Hash => hash(setup, stop)?,
        Material::Matmul(product) => multiply(setup, product, stop)?,
        Material::Prompts(questions, check) => answer(setup, questions, *check, stop)?,
    };
    setup.progress("");
    if stop.asked() {
        return Err(Interrupted.into());
    }
    Ok(prepared)
}

impl Setup {
    /// Says what is going on, where someone watches.
    fn progress(&self, text: &str) {
        if !self.quiet {
            output::progress(text);
        }
    }
}
