// SPDX-License-Identifier: Apache-2.0
//! A load for a server that speaks OpenAI's API: clients that ask one thing after the other or by the clock, for prompts
//! and answers of given lengths, over connections to this machine. What each of them saw, beside what was foretold.

mod ask;
mod own;
mod row;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use spanker_engine::{ServiceLoad, middle_and_tail};

use crate::error::{BenchError, Result};
use ask::{Answer, Connection, Refused};
pub use own::{OwnServer, ServeBench, local_address};
pub use row::{OwnSteps, ServeRow, Times};

/// A server that is loaded.
#[derive(Debug, Clone)]
pub struct LoadTarget {
    /// Where it listens: an address of this machine.
    pub address: SocketAddr,
    /// A key that it asks for.
    pub key: Option<String>,
    /// What it calls its model; nothing for the only one.
    pub model: Option<String>,
    /// Tokens that its model has.
    pub vocab: u64,
    /// What prompts follow from.
    pub seed: u64,
    /// How long an answer may take.
    pub timeout: Duration,
}

/// What clients saw.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadSeen {
    /// Tokens of answers in a second, of all clients together.
    pub tokens_per_second: f64,
    /// Tokens of all answers.
    pub tokens: usize,
    /// Seconds to the first token: the middle one, and what all but one of a hundred stay below.
    pub first: [f64; 2],
    /// The same between tokens.
    pub between: [f64; 2],
    /// The part of the prompts' tokens that was there already, if the server says so.
    pub reused: Option<f64>,
    /// Requests that were answered.
    pub answered: usize,
    /// Requests that were refused because too many waited.
    pub refused: usize,
    /// What became of the others.
    pub failed: Vec<String>,
}

/// Has clients ask for what a load says. `tell` is called with how many requests are over.
///
/// # Errors
/// [`BenchError::Load`] for a server that is not on this machine; threads that this machine does not give.
pub fn load_server(
    target: &LoadTarget,
    load: ServiceLoad,
    tell: impl Fn(usize) + Send + Sync + 'static,
) -> Result<LoadSeen> {
    if !target.address.ip().is_loopback() {
        let address = target.address;
        return Err(BenchError::Load(format!(
            "{address}: only servers on this machine are loaded"
        )));
    }
    let threads = |error: std::io::Error| BenchError::Threads(error.to_string());
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(threads)?;
    let outcomes = runtime.block_on(all(target, load, Arc::new(tell)));
    Ok(seen(&outcomes, load))
}

/// What became of a request.
struct Outcome {
    asked: Instant,
    ended: Instant,
    answer: Result<Answer, Refused>,
}

async fn all(
    target: &LoadTarget,
    load: ServiceLoad,
    tell: Arc<dyn Fn(usize) + Send + Sync>,
) -> Vec<Outcome> {
    let over = Arc::new(AtomicUsize::new(0));
    let begun = Instant::now();
    let one = |numbers: Vec<(usize, Option<f64>)>| {
        let (target, over, tell) = (target.clone(), Arc::clone(&over), Arc::clone(&tell));
        let mut connection = Connection::new(target.clone());
        async move {
            let mut outcomes = Vec::with_capacity(numbers.len());
            for (number, at) in numbers {
                if let Some(at) = at {
                    let due = begun + Duration::from_secs_f64(at);
                    tokio::time::sleep_until(due.into()).await;
                }
                let prompt = prompt(&target, load, number);
                let asked = Instant::now();
                let answer = connection.ask(&prompt, load.answer).await;
                outcomes.push(Outcome { asked, ended: Instant::now(), answer });
                tell(over.fetch_add(1, Ordering::Relaxed) + 1);
            }
            outcomes
        }
    };
    let total = load.clients * load.requests;
    // By the clock, every request has a connection of its own: it does not wait for those before it.
    let tasks: Vec<_> = match load.arrivals.times(total) {
        Some(times) => times
            .into_iter()
            .enumerate()
            .map(|(number, at)| tokio::spawn(one(vec![(number, Some(at))])))
            .collect(),
        None => (0..load.clients)
            .map(|client| {
                let numbers = (0..load.requests).map(|turn| (turn * load.clients + client, None));
                tokio::spawn(one(numbers.collect()))
            })
            .collect(),
    };
    let mut outcomes = Vec::with_capacity(total);
    for task in tasks {
        // A task that panicked has said so.
        outcomes.extend(task.await.unwrap_or_default());
    }
    outcomes
}

/// A prompt: what all begin with, then tokens that no other prompt has there.
fn prompt(target: &LoadTarget, load: ServiceLoad, number: usize) -> Vec<u32> {
    // The first tokens of most vocabularies mean something special.
    let least = (target.vocab / 8).min(1000) as u32;
    let most = u32::try_from(target.vocab).unwrap_or(u32::MAX).max(least + 1);
    let mut common = Pcg64Mcg::seed_from_u64(target.seed);
    let mut own = Pcg64Mcg::seed_from_u64(target.seed ^ (number as u64 + 1).rotate_left(32));
    (0..load.prompt)
        .map(|at| if at < load.shared { &mut common } else { &mut own }.random_range(least..most))
        .collect()
}

/// What all requests together come to.
fn seen(outcomes: &[Outcome], load: ServiceLoad) -> LoadSeen {
    let (mut firsts, mut betweens) = (Vec::new(), Vec::new());
    let (mut tokens, mut cached, mut answered, mut refused) = (0, None, 0, 0);
    let mut failed = Vec::new();
    for outcome in outcomes {
        match &outcome.answer {
            Ok(answer) => {
                answered += 1;
                tokens += answer.tokens;
                if let Some(of) = answer.cached {
                    *cached.get_or_insert(0) += of;
                }
                firsts.extend(answer.times.first().map(|at| (*at - outcome.asked).as_secs_f64()));
                let pairs = answer.times.windows(2);
                betweens.extend(pairs.map(|pair| (pair[1] - pair[0]).as_secs_f64()));
            }
            Err(Refused::Full) => refused += 1,
            Err(Refused::Failed(what)) => failed.push(what.clone()),
        }
    }
    let begun = outcomes.iter().map(|outcome| outcome.asked).min();
    let ended = outcomes.iter().map(|outcome| outcome.ended).max();
    let seconds = begun.zip(ended).map_or(0.0, |(begun, ended)| (ended - begun).as_secs_f64());
    let prompts = (answered * load.prompt).max(1);
    LoadSeen {
        tokens_per_second: if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 },
        tokens,
        first: middle_and_tail(&mut firsts),
        between: middle_and_tail(&mut betweens),
        reused: cached.map(|tokens: usize| tokens as f64 / prompts as f64),
        answered,
        refused,
        failed,
    }
}

#[cfg(test)]
mod tests;
