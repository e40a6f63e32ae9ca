// SPDX-License-Identifier: Apache-2.0
//! A job as it is asked for: what its items are, which backends do them, what is made to go wrong. Preparing it checks that
//! all of this goes together and fits the memory; nobody works on it here.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ggml_spanker::{Q4_K_BLOCK_BYTES, QK_K};
use spanker_steal::{Fault, Job, Options};

use super::Product;
use super::backends::{BackendKind, BackendList};
use super::expected::BYTES;
use super::questions::Questions;
use crate::error::{EngineError, Result};
use crate::model::Model;

/// How long a job whose items sleep ideally takes, in seconds, where nobody says how long an item does.
const IDEAL: f64 = 1.0;

/// What the items of a job are.
#[derive(Debug, Clone)]
pub enum Workload {
    /// Items that take time, and nothing else.
    Sleep {
        /// How many.
        items: usize,
    },
    /// Items that are hashed.
    Hash {
        /// How many.
        items: usize,
    },
    /// Rows of a product of two random Q4_K matrices.
    Matmul {
        /// Rows of the left operand: the items.
        rows: usize,
        /// Values of a row, a multiple of 256.
        k: usize,
        /// Rows of the right operand.
        n: usize,
    },
    /// Prompts for a model.
    Prompts {
        /// The model.
        model: Arc<Model>,
        /// The prompts.
        texts: Vec<String>,
        /// Tokens of an answer at most.
        tokens: usize,
        /// Answer all prompts once more beforehand, on threads, and compare every token.
        check: bool,
    },
}

impl Workload {
    /// The kind in a word.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Workload::Sleep { .. } => "sleep",
            Workload::Hash { .. } => "hash",
            Workload::Matmul { .. } => "matmul",
            Workload::Prompts { .. } => "prompts",
        }
    }

    /// How a run deals with time where nobody says.
    #[must_use]
    pub fn options(&self) -> Options {
        match self {
            Workload::Prompts { .. } => super::prompts::OPTIONS,
            _ => Options::STANDARD,
        }
    }
}

/// A job as it is asked for.
#[derive(Debug, Clone)]
pub struct JobRequest {
    /// What the items are.
    pub workload: Workload,
    /// Who does them.
    pub backends: BackendList,
    /// What goes wrong with which backend, by its name as in [`BackendList::names`].
    pub faults: Vec<(String, Fault)>,
    /// Parts of the items, from 0 to 1, and how many times as much as others each of them costs.
    pub hot: Vec<(Range<f64>, f64)>,
    /// What an item takes at the base speed, where items sleep; without it, the whole job ideally takes a second.
    pub item_time: Option<Duration>,
    /// What every chunk of an emulated backend costs beside its items.
    pub launch: Duration,
    /// Speeds and launch costs are told to the scheduler beforehand.
    pub told: bool,
    /// What chance starts from.
    pub seed: u64,
    /// How the run deals with time, trouble and trust.
    pub options: Options,
    /// The job runs in virtual time.
    pub simulate: bool,
    /// The largest part by which a chunk may take longer in virtual time, at random.
    pub jitter: f64,
    /// The job is also run by the first version's rule.
    pub origin: bool,
}

/// What it takes to do the items.
pub(super) enum Inputs {
    /// Nothing.
    Sleep,
    /// Their numbers.
    Hash,
    /// The operands.
    Matmul(Arc<Product>),
    /// Prompts, and whether their answers are compared.
    Prompts(Box<Questions>, bool),
}

/// A job that is ready to run.
pub struct PreparedJob {
    pub(super) request: JobRequest,
    pub(super) inputs: Inputs,
    pub(super) job: Job,
    /// Bytes of one output.
    pub(super) bytes: usize,
    pub(super) names: Vec<String>,
    /// What goes wrong with each backend, in order of time.
    pub(super) faults: Vec<Vec<Fault>>,
    pub(super) hot: Vec<(Range<usize>, f64)>,
    /// Items a second at the base speed, where items sleep.
    pub(super) base: f64,
}

impl JobRequest {
    /// Checks the request and makes the operands, or tokens, of its items.
    ///
    /// # Errors
    /// [`EngineError::Request`] for a request that makes no sense or does not fit the memory, [`EngineError::Prompt`] for a
    /// prompt that cannot be answered.
    pub fn prepare(self) -> Result<PreparedJob> {
        self.check()?;
        let names = self.backends.names();
        let faults = self.faults_of(&names)?;
        let plain = |items| self.in_memory(Job::new(items, BYTES), 0);
        let (inputs, job, bytes) = match &self.workload {
            Workload::Sleep { items } => (Inputs::Sleep, plain(*items)?, BYTES),
            Workload::Hash { items } => (Inputs::Hash, plain(*items)?, BYTES),
            Workload::Matmul { rows, k, n } => {
                let blocks = rows.saturating_add(*n).saturating_mul(k / QK_K);
                let operands = blocks.saturating_mul(Q4_K_BLOCK_BYTES);
                self.in_memory(Job::new(*rows, n.saturating_mul(4)), operands)?;
                let product = Product::synthetic(*rows, *k, *n, self.seed)?;
                let (job, bytes) = (product.job(), product.output_bytes());
                (Inputs::Matmul(Arc::new(product)), job, bytes)
            }
            Workload::Prompts { model, texts, tokens, check } => {
                let questions = Questions::new(Arc::clone(model), texts.clone(), *tokens)?;
                let job = questions.prompts.job();
                (Inputs::Prompts(Box::new(questions), *check), job, 4 * tokens)
            }
        };
        let job = job.options(self.options.clone());
        let items = job.items();
        let at = |part: f64| ((part * items as f64).round() as usize).min(items);
        let hot = self.hot.iter().map(|(part, cost)| (at(part.start)..at(part.end), *cost));
        let hot = hot.collect();
        let base = match self.item_time {
            Some(time) => 1.0 / time.as_secs_f64(),
            None => items as f64 / (IDEAL * self.backends.speeds()),
        };
        Ok(PreparedJob { request: self, inputs, job, bytes, names, faults, hot, base })
    }

    /// Refuses backends and settings that a job has no use for.
    fn check(&self) -> Result<()> {
        let job = self.workload.name();
        let prompts = matches!(self.workload, Workload::Prompts { .. });
        let matmul = matches!(self.workload, Workload::Matmul { .. });
        let refused = |what: String| Err(EngineError::request(what));
        for kind in &self.backends.0 {
            return refused(match kind {
                BackendKind::Card { index } if !prompts && !matmul => {
                    format!("card:{index}: --job {job} runs on cpu and emul backends only")
                }
                BackendKind::Card { index } if self.simulate => {
                    format!("card:{index}: a card has no virtual time, use emul with --simulate")
                }
                BackendKind::Gpu { index } if !matmul || self.simulate => {
                    format!("gpu:{index}: GPUs do --job matmul, on real threads only")
                }
                BackendKind::Emul { speed } if prompts => format!(
                    "emul:{speed}x: nobody knows an answer without a model: --job prompts runs on \
                     cpu and card backends only"
                ),
                _ => continue,
            });
        }
        if self.simulate && prompts {
            return refused("--job prompts runs for real only, without --simulate".into());
        }
        if (prompts || matmul) && !self.hot.is_empty() && !self.simulate {
            return refused(format!(
                "--hot: what an item of --job {job} costs is its own business"
            ));
        }
        self.check_sizes()?;
        self.check_times()?;
        let sleep = matches!(self.workload, Workload::Sleep { .. });
        if self.item_time.is_some() && !sleep && !self.simulate {
            return refused(format!(
                "--item-time is for --job sleep and --simulate: what --job {job} takes is measured"
            ));
        }
        Ok(())
    }

    /// Refuses sizes that no job has.
    fn check_sizes(&self) -> Result<()> {
        let refused = |what: String| Err(EngineError::request(what));
        match &self.workload {
            Workload::Matmul { k, .. } if *k == 0 || !k.is_multiple_of(QK_K) => {
                refused(format!("--k {k}: expected a positive multiple of {QK_K}"))
            }
            Workload::Matmul { n, .. } if n.checked_mul(4).is_none_or(|bytes| bytes == 0) => {
                refused(format!("--n {n}: expected a number of rows above zero"))
            }
            Workload::Prompts { tokens: 0, .. } => {
                refused("--tokens 0: an answer has at least one token".into())
            }
            _ => Ok(()),
        }
    }

    /// Refuses times that no run could keep to.
    fn check_times(&self) -> Result<()> {
        const HOUR: Duration = Duration::from_secs(3600);
        let Options { cap, lease, patience, .. } = self.options;
        let item_time = self.item_time.unwrap_or(HOUR);
        let times = [
            ("--cap", cap, Duration::from_micros(10), HOUR),
            ("--lease", lease, Duration::from_millis(1), HOUR),
            ("--patience", patience, lease, 24 * HOUR),
            ("--launch", self.launch, Duration::ZERO, Duration::from_secs(60)),
            ("--item-time", item_time, Duration::from_nanos(1), HOUR),
        ];
        match times.into_iter().find(|(_, time, least, most)| !(least..=most).contains(&time)) {
            None => Ok(()),
            Some((flag, time, least, most)) => {
                let what = format!("{flag} {time:?}: expected {least:?} to {most:?}");
                Err(EngineError::request(what))
            }
        }
    }

    /// What goes wrong with each of the backends of these names, in order of time.
    fn faults_of(&self, names: &[String]) -> Result<Vec<Vec<Fault>>> {
        let mut faults = vec![Vec::new(); names.len()];
        for (backend, fault) in &self.faults {
            let place = names.iter().position(|name| name == backend).ok_or_else(|| {
                let there = names.join(", ");
                EngineError::request(format!("there is no backend '{backend}': there are {there}"))
            })?;
            faults[place].push(*fault);
        }
        faults.iter_mut().for_each(|faults| faults.sort_by_key(|fault| fault.at));
        Ok(faults)
    }

    /// The job, if there is memory for it and `more` bytes.
    fn in_memory(&self, job: Job, more: usize) -> Result<Job> {
        let backends = self.backends.0.len();
        let bytes = job.check(backends).map_err(|error| EngineError::request(error.to_string()))?;
        // Outputs, what they should be, and as much again to work in.
        let needed = bytes.saturating_mul(3).saturating_add(more);
        match crate::memory::available() {
            Some(available) if needed > available => Err(EngineError::request(format!(
                "{} items need about {} MiB, and {} MiB are available",
                job.items(),
                needed >> 20,
                available >> 20
            ))),
            _ => Ok(job),
        }
    }
}

impl PreparedJob {
    /// Tasks that a backend works on at a time. A copy of a model answers one prompt after the other.
    pub(super) fn lanes(&self, kind: BackendKind) -> usize {
        if matches!(self.inputs, Inputs::Prompts(..)) { 1 } else { kind.lanes() }
    }

    /// What a task of a backend costs beside its items.
    pub(super) fn launch(&self, kind: BackendKind) -> Duration {
        match kind {
            BackendKind::Emul { .. } => self.request.launch,
            _ => Duration::ZERO,
        }
    }

    pub(super) fn kinds(&self) -> &[BackendKind] {
        &self.request.backends.0
    }
}
