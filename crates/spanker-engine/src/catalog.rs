// SPDX-License-Identifier: Apache-2.0
//! The names that models go by, what was fetched, and what of it fits and how fast.

use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use spanker_model::{Model, Quant, builtin, builtin_names};
use spanker_plan::{Objective, Request, choose};
use spanker_topology::{Bytes, BytesPerSecond, Cluster};

use crate::error::{EngineError, Result};
use crate::models::{self, KNOWN};
use crate::{memory, shape};

/// A model that commands take by its name.
#[derive(Debug, Serialize)]
pub struct Listed {
    /// What commands call it.
    pub name: String,
    /// `file` for one that can be run, `built-in` for a shape.
    pub kind: &'static str,
    /// How its weights are stored.
    pub quant: &'static str,
    /// Its weights.
    pub parameters: u64,
    /// Their bytes.
    pub weight_bytes: u64,
    /// The file; for a model that can be fetched and was not, nothing.
    pub path: Option<PathBuf>,
    /// Whether `spanker fetch` gets it.
    pub fetchable: bool,
    #[serde(flatten)]
    /// Whether it fits; nothing where nobody asked.
    pub fit: Option<Fit>,
}

/// Whether a model fits, and how fast it is then.
#[derive(Debug, Serialize)]
pub struct Fit {
    /// Whether there is memory for it.
    pub fits: bool,
    /// Nothing for what does not fit.
    pub predicted_tokens_per_second: Option<f64>,
}

/// What models are to fit.
#[derive(Debug)]
pub enum FitPlace {
    /// This machine.
    Here {
        /// Bytes that are free, where that is known.
        free: Option<u64>,
        /// Bytes that it reads in a second.
        rate: BytesPerSecond,
    },
    /// These cards.
    Cards(Box<Cluster>),
}

impl FitPlace {
    /// This machine, measured: what it reads in a second takes a moment.
    #[must_use]
    pub fn here() -> FitPlace {
        FitPlace::Here {
            free: memory::available().map(|bytes| bytes as u64),
            rate: measured_rate(),
        }
    }

    /// Where predictions come from, in words.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            FitPlace::Here { free, rate } => {
                let free = free.map_or_else(|| "?".to_owned(), |free| Bytes(free).to_string());
                format!(
                    "this machine, {free} free; by its memory alone: it reads {rate}, measured now, and a token reads \
                     all weights"
                )
            }
            FitPlace::Cards(cluster) => {
                let kinds = cluster.describe();
                format!("the best plan for {kinds} by their profiles, as 'spanker plan' finds it")
            }
        }
    }
}

/// Every model that has a name: built-in shapes, stored as `quant` says, and files that were fetched. With a place, whether
/// each fits there with so many tokens of context; `predicting` is called with the name of each before.
///
/// # Errors
/// [`EngineError::File`] for a file that was fetched and describes no model, [`EngineError::Plan`] for cards that cannot
/// be planned for.
pub fn list_models(
    quant: Quant,
    fit_in: Option<(&FitPlace, u64)>,
    predicting: impl Fn(&str),
) -> Result<Vec<Listed>> {
    let list = |name: &str, shape: &Model, path: Option<PathBuf>| -> Result<Listed> {
        predicting(name);
        Ok(Listed {
            name: name.to_owned(),
            kind: if path.is_some() { "file" } else { "built-in" },
            quant: shape::stored(shape),
            parameters: shape.parameters(),
            weight_bytes: shape.weight_bytes(),
            path,
            fetchable: models::known(name).is_some(),
            fit: fit_in.map(|(place, context)| fit(shape, context, place)).transpose()?,
        })
    };
    let mut listed = Vec::new();
    for name in builtin_names() {
        // What lies in the place of a model and is none is said by the commands that want it.
        let path = models::fetched(name).ok().flatten();
        let shape = match &path {
            Some(path) => shape::from_gguf(path)?,
            None => {
                builtin(name, quant).map_err(|error| EngineError::request(error.to_string()))?
            }
        };
        listed.push(list(name, &shape, path)?);
    }
    for known in KNOWN.iter().filter(|known| !builtin_names().contains(&known.name)) {
        if let Some(path) = models::fetched(known.name)? {
            listed.push(list(known.name, &shape::from_gguf(&path)?, Some(path))?);
        }
    }
    Ok(listed)
}

/// Whether a model fits, and the tokens that it then gives in a second.
fn fit(shape: &Model, context: u64, place: &FitPlace) -> Result<Fit> {
    let rate = match place {
        FitPlace::Here { free, rate } => {
            let cache = shape.kv_bytes_per_token(Quant::F16).saturating_mul(context);
            let needed = shape.weight_bytes().saturating_add(cache);
            let fits = free.is_none_or(|free| needed <= free);
            fits.then(|| rate.0 as f64 / shape.read_per_token() as f64)
        }
        FitPlace::Cards(cluster) => {
            let prompt = context.min(512);
            let request = Request { context, prompt, ..Request::new(Objective::Latency) };
            let cards: Vec<usize> = (0..cluster.cards()).collect();
            let choice = choose(shape, cluster, &cards, &request)?;
            choice.best_to_run().map(|best| best.prediction.tokens_per_second)
        }
    };
    Ok(Fit { fits: rate.is_some(), predicted_tokens_per_second: rate })
}

/// How fast all threads together read memory that no cache holds: what a token takes at least.
fn measured_rate() -> BytesPerSecond {
    const BYTES: usize = 256 << 20;
    const TURNS: u32 = 3;
    let words = vec![1u64; BYTES / 8];
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let read = || {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for part in words.chunks(words.len().div_ceil(threads)) {
                scope.spawn(move || {
                    std::hint::black_box(part.iter().fold(0u64, |sum, word| sum ^ word));
                });
            }
        });
        begun.elapsed().as_secs_f64()
    };
    let best = (0..TURNS).map(|_| read()).fold(f64::INFINITY, f64::min);
    BytesPerSecond((BYTES as f64 / best) as u64)
}
