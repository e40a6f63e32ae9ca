// SPDX-License-Identifier: Apache-2.0
//! The choice of the next token from logits: by the greatest, or by chance from the best.
//!
//! All arithmetic is in `f64` and in a fixed order, and the generator is a PCG, so that one seed gives
//! the same tokens everywhere.

use std::cmp::Ordering;
use std::collections::VecDeque;

use rand::Rng;
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;

use crate::TextError;

/// A token and its logit.
pub type Candidate = (u32, f32);

/// What bounds the choice of the next token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// How flat the probabilities are made; 0 takes the greatest logit.
    pub temperature: f64,
    /// Only so many of the best tokens; 0 takes all.
    pub top_k: usize,
    /// Only the best tokens that together have this probability; 1 takes all.
    pub top_p: f64,
    /// Only tokens with this share of the best one's probability; 0 takes all.
    pub min_p: f64,
    /// What makes tokens of the text so far less likely.
    pub penalties: Penalties,
    /// Where the generator begins.
    pub seed: u64,
}

/// What makes tokens of the text so far less likely, as llama.cpp and OpenAI have it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Penalties {
    /// Divides the positive logits of tokens that came before and multiplies negative ones; 1 changes nothing.
    pub repeat: f64,
    /// Taken from the logits of tokens that came before; 0 changes nothing.
    pub presence: f64,
    /// The same for each time that they came.
    pub frequency: f64,
    /// How many of the last tokens count, those of the prompt included.
    pub last: usize,
}

impl Penalties {
    /// No penalties. The last 64 tokens would count.
    pub const NONE: Penalties = Penalties { repeat: 1.0, presence: 0.0, frequency: 0.0, last: 64 };

    fn are_none(self) -> bool {
        let Penalties { repeat, presence, frequency, last } = self;
        last == 0 || (repeat == 1.0 && presence == 0.0 && frequency == 0.0)
    }

    /// Whether no token can become more likely.
    fn only_lower(self) -> bool {
        self.repeat >= 1.0 && self.presence >= 0.0 && self.frequency >= 0.0
    }

    /// The logit of a token that came so many times.
    fn apply(self, logit: f32, times: usize) -> f32 {
        let Penalties { repeat, presence, frequency, .. } = self;
        let logit = f64::from(logit);
        let scaled = if logit > 0.0 { logit / repeat } else { logit * repeat };
        (scaled - presence - times as f64 * frequency) as f32
    }
}

impl Settings {
    /// The settings that llama.cpp has unless told otherwise.
    #[must_use]
    pub const fn usual(seed: u64) -> Settings {
        Settings {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            penalties: Penalties::NONE,
            seed,
        }
    }

    /// Always the greatest logit.
    #[must_use]
    pub const fn greedy() -> Settings {
        let penalties = Penalties::NONE;
        Settings { temperature: 0.0, top_k: 1, top_p: 1.0, min_p: 0.0, penalties, seed: 0 }
    }
}

/// Chooses tokens, one after the other.
///
/// Logits of tokens that were accepted ([`Sampler::accept`]) are lowered by the penalties. The best `top_k` candidates
/// stay, of these the best that together have the probability `top_p`, of
/// these those with at least the share `min_p` of the best one's probability; their logits are divided
/// by the temperature, and one is drawn. Logits that are not numbers never win.
///
/// ```
/// use spanker_text::{Sampler, Settings};
///
/// let mut greedy = Sampler::new(Settings::greedy())?;
/// assert_eq!(greedy.choose(&[0.5, 2.0, f32::NAN, 2.0])?, 1);
/// let mut one = Sampler::new(Settings::usual(7))?;
/// let mut other = one.clone();
/// let logits = [1.0, 1.5, 0.9, 1.2];
/// assert_eq!(one.choose(&logits)?, other.choose(&logits)?);
/// # Ok::<(), spanker_text::TextError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    settings: Settings,
    random: Pcg64Mcg,
    /// The last tokens that were accepted, as many as penalties count.
    recent: VecDeque<u32>,
}

impl Sampler {
    /// A sampler at the beginning of its seed.
    ///
    /// # Errors
    ///
    /// A temperature that is negative or no number, a probability that is not between 0 and 1, or a penalty that is no
    /// number.
    pub fn new(settings: Settings) -> Result<Sampler, TextError> {
        let Settings { temperature, top_p, min_p, penalties, seed, .. } = settings;
        let wrong = |setting, value: f64, expected| {
            Err(TextError::Setting { setting, value: value.to_string(), expected })
        };
        if !temperature.is_finite() || temperature < 0.0 {
            return wrong("temperature", temperature, "a number from 0 on");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return wrong("top-p", top_p, "a number above 0 and up to 1");
        }
        if !(0.0..=1.0).contains(&min_p) {
            return wrong("min-p", min_p, "a number from 0 to 1");
        }
        let Penalties { repeat, presence, frequency, .. } = penalties;
        if !(repeat.is_finite() && repeat > 0.0) {
            return wrong("repeat-penalty", repeat, "a number above 0; 1 changes nothing");
        }
        for (name, value) in [("presence-penalty", presence), ("frequency-penalty", frequency)] {
            if !value.is_finite() {
                return wrong(name, value, "a number; 0 changes nothing");
            }
        }
        let random = Pcg64Mcg::seed_from_u64(seed);
        Ok(Sampler { settings, random, recent: VecDeque::new() })
    }

    /// Forgets the tokens that were accepted.
    pub fn forget(&mut self) {
        self.recent.clear();
    }

    /// Takes note of a token of the text: of the prompt, or one that was chosen. Penalties are for these.
    pub fn accept(&mut self, token: u32) {
        if self.settings.penalties.are_none() {
            return;
        }
        self.recent.push_back(token);
        if self.recent.len() > self.settings.penalties.last {
            self.recent.pop_front();
        }
    }

    /// The settings.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The next token from the logits of all tokens.
    ///
    /// # Errors
    ///
    /// No logit is a number above -inf.
    pub fn choose(&mut self, logits: &[f32]) -> Result<u32, TextError> {
        self.choose_from(&best(logits, self.wanted(logits.len())))
    }

    /// How many of the best candidates of a vocabulary of `tokens` [`Sampler::choose_from`] looks at;
    /// the others make no difference.
    #[must_use]
    pub fn wanted(&self, tokens: usize) -> usize {
        let Penalties { last, .. } = self.settings.penalties;
        match self.settings.penalties {
            penalties if penalties.are_none() => self.kept(tokens),
            // Each token that is lowered lets one more come up.
            penalties if penalties.only_lower() => {
                self.kept(tokens).saturating_add(last).min(tokens)
            }
            _ => tokens,
        }
    }

    /// How many of so many candidates `top_k` leaves.
    fn kept(&self, candidates: usize) -> usize {
        match self.settings {
            Settings { temperature: 0.0, .. } => candidates.min(1),
            Settings { top_k: 0, .. } => candidates,
            Settings { top_k, .. } => candidates.min(top_k),
        }
    }

    /// Candidates after penalties, in order.
    fn penalized(&self, candidates: &[Candidate]) -> Vec<Candidate> {
        let penalties = self.settings.penalties;
        let lowered = |&(token, logit): &Candidate| match self
            .recent
            .iter()
            .filter(|&&recent| recent == token)
            .count()
        {
            0 => (token, logit),
            times => (token, penalties.apply(logit, times)),
        };
        let mut all: Vec<Candidate> = candidates.iter().map(lowered).collect();
        if !penalties.are_none() {
            all.sort_by(order);
        }
        all
    }

    /// The next token from the best candidates: by logit descending, then by token ascending, as
    /// [`best`] gives them.
    ///
    /// # Errors
    ///
    /// No logit is a number above -inf.
    pub fn choose_from(&mut self, candidates: &[Candidate]) -> Result<u32, TextError> {
        let usable = candidates.iter().filter(|(_, logit)| *logit > f32::NEG_INFINITY);
        let usable: Vec<Candidate> = usable.copied().collect();
        let mut kept = self.penalized(&usable);
        kept.truncate(self.kept(candidates.len()));
        let Some(&(first, top)) = kept.first() else {
            return Err(TextError::NoCandidate { candidates: candidates.len() });
        };
        // Infinity less infinity is no number; what is infinite wins.
        if self.settings.temperature == 0.0 || top == f32::INFINITY {
            return Ok(first);
        }
        let top = f64::from(top);
        let weights: Vec<f64> =
            kept.iter().map(|(_, logit)| exp(f64::from(*logit) - top)).collect();
        let count = self.count(&weights);
        let flattened: Vec<f64> = kept[..count]
            .iter()
            .map(|(_, logit)| exp((f64::from(*logit) - top) / self.settings.temperature))
            .collect();
        let total: f64 = flattened.iter().sum();
        let mut left = self.random.random::<f64>() * total;
        for ((token, _), weight) in kept.iter().zip(&flattened) {
            if left < *weight {
                return Ok(*token);
            }
            left -= weight;
        }
        // Rounding may leave a little after the last.
        Ok(kept[count - 1].0)
    }

    /// How many of the first weights `top_p` and `min_p` leave: at least one. The first weight is 1.
    fn count(&self, weights: &[f64]) -> usize {
        let Settings { top_p, min_p, .. } = self.settings;
        let total: f64 = weights.iter().sum();
        let mut count = weights.len();
        if top_p < 1.0 {
            let mut sum = 0.0;
            let reached = |weight: &f64| {
                sum += weight;
                sum >= top_p * total
            };
            count = weights.iter().position(reached).map_or(count, |last| last + 1);
        }
        weights[..count].iter().take_while(|weight| **weight >= min_p).count().max(1)
    }
}

/// The exponential of a number up to 0, to the last bit or two. Only sums and products, whose bits are
/// the same everywhere; a system's own function is not.
fn exp(x: f64) -> f64 {
    // 2^-1080 is 0, and so is what has no logarithm.
    if x.is_nan() || x < -748.0 {
        return 0.0;
    }
    let twos = (x * std::f64::consts::LOG2_E).round();
    // The logarithm of 2 in two parts, of which the first has few digits: no digit of x is lost.
    let rest = (x - twos * 0.693_147_180_369_123_8) - twos * 1.908_214_929_270_587_7e-10;
    let mut sum = 1.0;
    for n in (1..=16).rev() {
        sum = 1.0 + sum * rest / f64::from(n);
    }
    // Two steps, so that the smallest results do not vanish on the way.
    let half = (twos as i32) / 2;
    let power = |n: i32| f64::from_bits(((1023 + n) as u64) << 52);
    sum * power(half) * power(twos as i32 - half)
}

/// By logit descending, then by token ascending.
fn order(a: &Candidate, b: &Candidate) -> Ordering {
    // Zeros of both signs are equal, so that their tokens decide.
    b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0))
}

/// The greatest `count` logits with their tokens: by logit descending, then by token ascending. What is
/// not a number is left out.
#[must_use]
pub fn best(logits: &[f32], count: usize) -> Vec<Candidate> {
    let mut all: Vec<Candidate> =
        (0..).zip(logits).map(|(at, logit)| (at, *logit)).filter(|(_, l)| !l.is_nan()).collect();
    if count == 0 {
        return Vec::new();
    }
    if count < all.len() {
        all.select_nth_unstable_by(count - 1, order);
        all.truncate(count);
    }
    all.sort_unstable_by(order);
    all
}

#[cfg(test)]
#[path = "sample/tests.rs"]
mod tests;
