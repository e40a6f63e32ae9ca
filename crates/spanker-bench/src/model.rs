// SPDX-License-Identifier: Apache-2.0
//! How fast a model takes a prompt and makes tokens on some hosts, beside the limit that reading its weights sets and
//! beside the prediction.
//!
//! Hosts take turns, and what a prediction is made from is measured in the same turns, so that both meet the same
//! neighbours.

mod read;
mod row;

use std::time::{Duration, Instant};

use spanker_engine::{Calibration, Engine, Fabric, Host, Model, Options, Wish};
use spanker_llm::Want;
use spanker_plan::{Plan, Request};
use spanker_reduce::Team;

use crate::error::Result;
use read::Weights;
pub use row::{Limit, Memory, ModelRow, Phase, TokenTime};

/// What is asked of every host.
#[derive(Debug, Clone)]
pub struct Work {
    /// The prompt, the room for tokens, the batch, and the part of cards' operators that the host computes again.
    pub request: Request,
    /// Tokens that are generated after the prompt.
    pub generated: usize,
    /// Repeats, after one to warm up.
    pub repeats: u64,
    /// How to split the model.
    pub wish: Wish,
}

/// What each repeat gave. Speeds are tokens per second.
#[derive(Debug, Default)]
struct Repeats {
    prompt_wall: Vec<f64>,
    prompt_card: Vec<f64>,
    wall: Vec<f64>,
    card: Vec<f64>,
    /// Seconds of a token on exchanges and waiting.
    sync: Vec<f64>,
    /// Bytes per second of plain reading.
    bandwidths: Vec<f64>,
    /// Bytes of weights that a token reads.
    bytes: u64,
}

/// Measures a model on hosts that take turns. Cards, GPUs and ranks are lent to one row at a time: their hosts come
/// one by one. `opened` is how long it took to open host and model; `begins` is called with which turn comes next.
///
/// # Errors
/// What planning, loading or running the model fails with.
pub fn model(
    model: &Model,
    hosts: &[&Host],
    work: &Work,
    opened: Duration,
    mut begins: impl FnMut(u64),
) -> Result<Vec<ModelRow>> {
    let network = model.network();
    let weights = Weights::of(network);
    // Tokens of no meaning: what is asked of the cards does not depend on them.
    let vocab = network.model().vocab;
    let prompt = (0..work.request.prompt).map(|at| ((100 + 7 * at) % vocab) as u32);
    let prompt: Vec<u32> = prompt.collect();
    let subjects = hosts.iter().map(|&host| Subject::new(host, model, work, opened));
    let mut subjects = subjects.collect::<Result<Vec<_>>>()?;
    for turn in 0..=work.repeats {
        for subject in &mut subjects {
            begins(turn);
            let counts = turn > 0;
            if let Some(team) = &subject.readers {
                let seconds = weights.read(network.bytes(), team);
                let rate = weights.bytes() as f64 / seconds;
                subject.repeats.bandwidths.extend(counts.then_some(rate));
            }
            subject.calibrate()?;
            subject.load(work)?;
            subject.once(&prompt, work.generated, counts)?;
        }
    }
    let finished = |mut subject: Subject<'_>| {
        subject.repeats.bytes = weights.bytes();
        let plan = subject.calibration.priced(subject.host, &subject.plan)?;
        let load_ms = subject.load.as_secs_f64() * 1e3;
        Ok(row::row(subject.host, model, &plan, work, subject.repeats, load_ms))
    };
    subjects.into_iter().map(finished).collect()
}

/// What a row runs on.
struct Subject<'p> {
    host: &'p Host,
    model: &'p Model,
    plan: Plan,
    engine: Option<Engine<'p>>,
    calibration: Calibration,
    /// Threads that read the weights and no more.
    readers: Option<Team>,
    load: Duration,
    repeats: Repeats,
}

impl<'p> Subject<'p> {
    fn new(host: &'p Host, model: &'p Model, work: &Work, opened: Duration) -> Result<Self> {
        let begun = Instant::now();
        let plan = host.plan(model, &work.request, &work.wish)?;
        let calibration = Calibration::new(host, model, &plan)?;
        let planned = begun.elapsed();
        let inproc = host.fabric() == Fabric::Inproc;
        let readers = inproc.then(|| Team::new(host.thread_count()));
        let bandwidths = host.gpu_read_rate()?.into_iter().collect();
        let repeats = Repeats { bandwidths, ..Repeats::default() };
        let load = opened + planned;
        let mut subject =
            Subject { host, model, plan, engine: None, calibration, readers, load, repeats };
        let begun = Instant::now();
        subject.load(work)?;
        subject.load += begun.elapsed();
        Ok(subject)
    }

    fn load(&mut self, work: &Work) -> Result<()> {
        if self.engine.is_none() {
            let options = Options { record: false, audit: work.request.audit };
            let plan = self.plan.clone();
            self.engine = Some(Engine::load_with(self.host, self.model, plan, options)?);
        }
        Ok(())
    }

    /// Measures what predictions are made from.
    fn calibrate(&mut self) -> Result<()> {
        if self.host.rank_place().is_some() {
            // Ranks hold one layout at a time.
            self.engine = None;
        }
        Ok(self.calibration.round(self.host, self.model, &self.plan)?)
    }

    /// One prompt, and tokens after it.
    fn once(&mut self, prompt: &[u32], generated: usize, counts: bool) -> Result<()> {
        let Some(engine) = &mut self.engine else { return Ok(()) };
        engine.cut(0);
        // A token first: what was measured meanwhile has weights of its own, which have taken the place of these in caches.
        engine.feed(&prompt[..prompt.len().min(1)], Want::Best(1))?;
        engine.cut(0);
        let begun = Instant::now();
        let mut outcome = engine.feed(prompt, Want::Best(1))?;
        let (prompt_wall, prompt_card) = (begun.elapsed(), outcome.timing.card);
        let begun = Instant::now();
        let (mut sync, mut card) = (Duration::ZERO, None);
        for _ in 0..generated {
            let best = outcome.outputs.first().and_then(|output| output.best.first());
            let token = best.map_or(0, |&(token, _)| token);
            outcome = engine.feed(&[token], Want::Best(1))?;
            sync += outcome.timing.sync;
            card = outcome.timing.card.map(|time| time + card.unwrap_or_default());
        }
        let wall = begun.elapsed();
        if counts {
            let rate = |count: usize, time: Duration| count as f64 / time.as_secs_f64();
            let repeats = &mut self.repeats;
            repeats.prompt_wall.push(rate(prompt.len(), prompt_wall));
            repeats.prompt_card.extend(prompt_card.map(|time| rate(prompt.len(), time)));
            repeats.wall.push(rate(generated, wall));
            repeats.card.extend(card.map(|time| rate(generated, time)));
            repeats.sync.push(sync.as_secs_f64() / generated as f64);
        }
        Ok(())
    }
}
