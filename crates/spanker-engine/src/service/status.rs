// SPDX-License-Identifier: Apache-2.0
//! What a service is doing, as numbers.

use std::time::Duration;

use crate::draft::DraftCounts;
use crate::model::Model;

/// Blocks of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KvBlocks {
    /// All of them.
    pub total: usize,
    /// Those of answers that are under way.
    pub used: usize,
    /// Those of none, whose content may be used again.
    pub cached: usize,
    /// Tokens that a block has room for.
    pub tokens: usize,
}

impl KvBlocks {
    /// Those of two copies of the model.
    pub(crate) fn plus(self, other: KvBlocks) -> KvBlocks {
        KvBlocks {
            total: self.total + other.total,
            used: self.used + other.used,
            cached: self.cached + other.cached,
            tokens: self.tokens,
        }
    }
}

/// What a card does for the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CardState {
    /// It holds a part of the model.
    Serving,
    /// It holds nothing.
    Idle,
    /// It was lost.
    Lost,
}

impl CardState {
    /// In a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            CardState::Serving => "serving",
            CardState::Idle => "idle",
            CardState::Lost => "lost",
        }
    }
}

/// A card of the service.
#[derive(Debug, Clone, PartialEq)]
pub struct CardStatus {
    /// The device's number.
    pub number: usize,
    /// Its kind.
    pub profile: String,
    /// What it does.
    pub state: CardState,
    /// The copy of the model that it belongs to.
    pub copy: usize,
    /// Its stage.
    pub stage: usize,
    /// Layers that it holds.
    pub layers: std::ops::Range<usize>,
    /// Heads of each that it holds, of how many.
    pub heads: (usize, usize),
    /// Bytes of weights, of keys and values, and of buffers.
    pub bytes: [u64; 3],
    /// Bytes that it has.
    pub capacity: u64,
    /// The part of its time that it computed, lately.
    pub busy: f64,
    /// The part of its time that it waited for other cards, lately.
    pub waiting: f64,
}

/// What a service is doing.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    /// The model.
    pub model: String,
    /// What cards are.
    pub fabric: &'static str,
    /// How the model is laid out, in words.
    pub layout: String,
    /// Copies of the model.
    pub copies: usize,
    /// The cards.
    pub cards: Vec<CardStatus>,
    /// Pairs of cards that are linked.
    pub links: Vec<(usize, usize)>,
    /// Requests that are answered at the moment.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that were answered.
    pub answered: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that nobody listened to any more.
    pub cancelled: u64,
    /// Requests that were refused because too many waited.
    pub refused: u64,
    /// Tokens of prompts, without those that were cached.
    pub prompt_tokens: u64,
    /// Tokens of prompts that need not be computed.
    pub cached_tokens: u64,
    /// Tokens that were generated.
    pub tokens: u64,
    /// Steps.
    pub steps: u64,
    /// Seconds that steps took, and were predicted to take.
    pub step_seconds: (f64, f64),
    /// Tokens in a second, lately, and predicted for as many requests.
    pub rate: (f64, f64),
    /// Cards that were lost, and that came back.
    pub cards_lost: u64,
    /// See `cards_lost`.
    pub cards_back: u64,
    /// Requests whose tokens were computed again because a card was lost.
    pub recomputed: u64,
    /// Requests that gave their blocks up for others and went on later.
    pub put_back: u64,
    /// What guesses came to.
    pub draft: DraftCounts,
    /// Blocks of keys and values.
    pub kv: KvBlocks,
    /// What is expected of so many clients: tokens in a second of all together.
    pub expected: Vec<(usize, f64)>,
    /// Whether no more requests are taken.
    pub is_ending: bool,
    /// Why nothing runs any more.
    pub broken: Option<String>,
}

impl Status {
    pub(crate) fn of(model: &Model) -> Status {
        let name = model.path().file_stem().map(|name| name.to_string_lossy().into_owned());
        Status {
            model: name.unwrap_or_default(),
            fabric: "",
            layout: String::new(),
            copies: 0,
            cards: Vec::new(),
            links: Vec::new(),
            running: 0,
            waiting: 0,
            answered: 0,
            failed: 0,
            cancelled: 0,
            refused: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            tokens: 0,
            steps: 0,
            step_seconds: (0.0, 0.0),
            rate: (0.0, 0.0),
            cards_lost: 0,
            cards_back: 0,
            recomputed: 0,
            put_back: 0,
            draft: DraftCounts::default(),
            kv: KvBlocks::default(),
            expected: Vec::new(),
            is_ending: false,
            broken: None,
        }
    }

    /// When there will be room for another request: what is under way, at the usual speed.
    pub(crate) fn room_in(&self) -> Duration {
        let rate = if self.rate.0 > 0.0 { self.rate.0 } else { self.rate.1 };
        let each = self.tokens as f64 / (self.answered.max(1)) as f64;
        let seconds = if rate > 0.0 { each.max(1.0) / rate } else { 1.0 };
        Duration::from_secs_f64(seconds.clamp(1.0, 3600.0))
    }
}
