// SPDX-License-Identifier: Apache-2.0
//! What answers in the place of an engine: it says what a test has it say, token by token, and keeps to what was asked:
//! constraints, biases, chances, limits. Every answer has a thread of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use spanker_engine::{
    Ask, Chance, Correction, Delivery, Done, FinishReason, KvBlocks, Model, Refusal, ServedPiece,
    ServiceOptions, Status, Taken, Update,
};
use spanker_serve::Backend;

/// What is said to a request.
pub trait Voice: Send + Sync + 'static {
    /// The answer; `tell` says whether anybody listens.
    fn speak(&self, model: &Model, ask: Ask, tell: &mut dyn FnMut(Update) -> bool);
}

impl<F: Fn(&Model, Ask, &mut dyn FnMut(Update) -> bool) + Send + Sync + 'static> Voice for F {
    fn speak(&self, model: &Model, ask: Ask, tell: &mut dyn FnMut(Update) -> bool) {
        self(model, ask, tell);
    }
}

struct Shared {
    status: Mutex<Status>,
    is_ending: AtomicBool,
}

pub struct Script {
    model: Arc<Model>,
    options: ServiceOptions,
    voice: Arc<dyn Voice>,
    shared: Arc<Shared>,
}

impl Script {
    pub fn new(model: Arc<Model>, options: ServiceOptions, voice: impl Voice) -> Script {
        let is_ending = AtomicBool::new(false);
        let shared = Arc::new(Shared { status: Mutex::new(status()), is_ending });
        Script { model, options, voice: Arc::new(voice), shared }
    }
}

/// What a service says that has done nothing.
pub fn status() -> Status {
    Status {
        model: "tiny".into(),
        fabric: "script",
        layout: "one card".into(),
        copies: 1,
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
        draft: spanker_engine::DraftCounts::default(),
        kv: KvBlocks { total: 64, used: 0, cached: 0, tokens: 16 },
        expected: vec![(1, 10.0), (4, 30.0)],
        is_ending: false,
        broken: None,
    }
}

impl Shared {
    fn update<T>(&self, change: impl FnOnce(&mut Status) -> T) -> T {
        change(&mut self.status.lock().expect("no panic"))
    }
}

impl Backend for Script {
    fn model(&self) -> &Arc<Model> {
        &self.model
    }

    fn options(&self) -> &ServiceOptions {
        &self.options
    }

    fn submit(&self, ask: Ask, mut deliver: Delivery) -> Result<Taken, Refusal> {
        if self.shared.is_ending.load(Ordering::Relaxed) {
            return Err(Refusal::Ending);
        }
        let room = self.options.parallel + self.options.queue;
        let running = self.shared.update(|status| {
            let full = status.running >= room;
            status.running += usize::from(!full);
            status.refused += u64::from(full);
            if full { Err(status.running) } else { Ok(()) }
        });
        if let Err(waiting) = running {
            return Err(Refusal::Full { waiting, retry_after: Duration::from_millis(2500) });
        }
        let stop = ask.limits.stop.clone();
        let (model, voice, shared) =
            (Arc::clone(&self.model), Arc::clone(&self.voice), Arc::clone(&self.shared));
        std::thread::spawn(move || {
            let mut heard = true;
            voice.speak(&model, ask, &mut |update| {
                heard = heard && deliver(update);
                heard
            });
            drop(deliver);
            shared.update(|status| {
                status.running -= 1;
                status.answered += u64::from(heard);
                status.cancelled += u64::from(!heard);
            });
        });
        Ok(Taken { id: 1, stop })
    }

    fn status(&self) -> Status {
        let mut status = self.shared.update(|status| status.clone());
        status.is_ending = self.shared.is_ending.load(Ordering::Relaxed);
        status
    }

    fn drain(&self) {
        self.shared.is_ending.store(true, Ordering::Relaxed);
    }
}

/// How an answer ended.
pub fn done(ask_tokens: usize, tokens: usize, reason: FinishReason) -> Update {
    Update::Done(Done {
        reason,
        stop: None,
        prompt_tokens: ask_tokens,
        cached_tokens: 3,
        tokens,
        waited: Duration::ZERO,
        prompt: Duration::from_millis(100),
        generation: Duration::from_millis(200),
    })
}

/// A piece of a text.
pub fn piece(token: u32, text: &str) -> Update {
    Update::Piece(ServedPiece {
        token: Some(token),
        text: text.into(),
        chances: Vec::new(),
        corrects: None,
    })
}

/// A piece that takes back what came before.
pub fn corrected(token: u32, text: &str, from: usize, right: usize) -> Update {
    let corrects =
        Correction { token: from, text: right, blamed: "card 2 gives wrong answers".into() };
    Update::Piece(ServedPiece {
        token: Some(token),
        text: text.into(),
        chances: Vec::new(),
        corrects: Some(corrects),
    })
}

/// Says a text token by token, as far as constraints and limits let it: where the text does not go on as it must,
/// whatever token may follow that is nearest to an end.
pub fn says(text: impl Into<String>) -> impl Voice {
    let text = text.into();
    move |model: &Model, mut ask: Ask, tell: &mut dyn FnMut(Update) -> bool| {
        let tokenizer = model.tokenizer();
        let mut wanted = tokenizer.encode(&text, false, true).into_iter();
        let mut stream = spanker_text::Stream::new();
        let mut tokens = 0;
        let count = ask.prompt.len();
        if !tell(Update::Begun { cached_tokens: 3 }) {
            return;
        }
        let most = ask.limits.tokens.unwrap_or(usize::MAX).min(super::place::CONTEXT - count);
        let reason = loop {
            if ask.limits.stop.is_stopped() {
                break FinishReason::Stopped;
            }
            if tokens >= most {
                break FinishReason::Length;
            }
            let token = match &mut ask.constraint {
                None => wanted.next(),
                Some(constraint) => held(&mut **constraint, tokenizer, &mut wanted, tokens),
            };
            let Some(token) = token else { break FinishReason::End };
            tokens += 1;
            let chances = ask.chances.map_or_else(Vec::new, |best| {
                let chance = |at| Chance { token: token + at, logprob: -0.5 - at as f32 };
                (0..=best as u32).map(|at| chance(at.saturating_sub(1))).collect()
            });
            let text = stream.push(tokenizer, token);
            if !tell(Update::Piece(ServedPiece {
                token: Some(token),
                text,
                chances,
                corrects: None,
            })) {
                return;
            }
        };
        tell(done(count, tokens, reason));
    }
}

/// The next token of an answer that is held to something; nothing at its end.
fn held(
    constraint: &mut dyn spanker_engine::Constraint,
    tokenizer: &spanker_text::Tokenizer,
    wanted: &mut impl Iterator<Item = u32>,
    tokens: usize,
) -> Option<u32> {
    if constraint.is_complete() {
        return None;
    }
    let mask = constraint.allowed().expect("a mask").expect("not everything");
    let may = |token: u32| mask[token as usize / 32] >> (token % 32) & 1 == 1;
    let next = wanted.next().filter(|&token| may(token));
    let next = next.or_else(|| nearest(tokenizer, tokens, may))?;
    constraint.accept(next).expect("a token that may follow");
    (!tokenizer.is_end(next)).then_some(next)
}

/// A token that may follow: what closes first, the longer the answer is.
fn nearest(
    tokenizer: &spanker_text::Tokenizer,
    length: usize,
    may: impl Fn(u32) -> bool,
) -> Option<u32> {
    let all = (0..tokenizer.vocab() as u32).filter(|&token| may(token));
    // Nobody is at the mercy of space.
    let (text, space): (Vec<u32>, Vec<u32>) = all
        .partition(|&token| !tokenizer.piece(token).first().is_some_and(u8::is_ascii_whitespace));
    let all = if text.is_empty() { space } else { text };
    let ends = all.iter().find(|&&token| tokenizer.is_end(token));
    let closes = all.iter().find(|&&token| b"\"}]".contains(&tokenizer.piece(token)[0]));
    let letter = all.iter().find(|&&token| tokenizer.piece(token)[0].is_ascii_alphanumeric());
    let any = [ends, closes.filter(|_| length > 8), letter, closes, all.first()];
    any.into_iter().flatten().next().copied()
}

/// Says one letter after the other until nobody listens, or it is stopped.
pub fn endless(between: Duration) -> impl Voice {
    move |_: &Model, ask: Ask, tell: &mut dyn FnMut(Update) -> bool| {
        let mut heard = tell(Update::Begun { cached_tokens: 0 });
        let mut tokens = 0;
        while heard && !ask.limits.stop.is_stopped() {
            heard = tell(piece(u32::from(b'a'), "a"));
            tokens += 1;
            if !between.is_zero() {
                std::thread::sleep(between);
            }
        }
        tell(done(ask.prompt.len(), tokens, FinishReason::Stopped));
    }
}
