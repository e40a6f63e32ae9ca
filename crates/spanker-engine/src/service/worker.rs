// SPDX-License-Identifier: Apache-2.0
//! The model's side of a service: steps of many sequences, one after the other, on whatever cards there are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use spanker_llm::{AuditLog, LlmError, Outcome, Output};

use super::answers::Answer;
use super::ask::{Ask, Delivery, Update};
use super::copy::{Asking, Copy, Place, pacings};
use super::{ServiceOptions, Shared};
use crate::batch::{Asked, SequenceId};
use crate::draft::DraftCounts;
use crate::error::{EngineError, Result};
use crate::generation::MOST_AGAIN;
use crate::given::casts_doubt;
use crate::host::{Event, Host};
use crate::model::Model;
use crate::summary::FinishReason;

/// How often cards that were lost are looked for; less and less often where cards come and go.
const LOOK: Duration = Duration::from_millis(250);
/// How many times as long at the most.
const MOST_PAUSE: u32 = 1 << 10;
/// When what has gone before is forgotten.
const CALM: Duration = Duration::from_secs(600);
/// How often cards are asked whether they are there while nobody else asks for anything.
const LISTEN: Duration = Duration::from_millis(500);
/// How long a card that is missed is looked for.
const MISSED: Duration = Duration::from_secs(5);
/// How long nobody asks before ranks hear that there is more to come.
const QUIET: Duration = Duration::from_millis(200);

/// A request on its way to the model.
pub(crate) struct Order {
    pub(crate) id: SequenceId,
    pub(crate) ask: Ask,
    pub(crate) deliver: Delivery,
}

pub(crate) struct Worker<'h> {
    place: Place<'h>,
    copies: Vec<Copy<'h>>,
    answers: BTreeMap<SequenceId, Answer>,
    /// The devices' numbers of the cards that are left.
    left: Vec<usize>,
    looked: Instant,
    /// When cards were last asked whether they are there.
    listened: Instant,
    /// How many times as long as usual it takes until cards are looked for again.
    pause: u32,
    /// When something was last wrong with cards.
    troubled: Instant,
    /// How often that was since without a card that is to blame and could be left out.
    unblamed: usize,
    shared: &'h Arc<Shared>,
}

impl<'h> Worker<'h> {
    pub(crate) fn load(
        host: &'h Host,
        model: &'h Model,
        options: &'h ServiceOptions,
        shared: &'h Arc<Shared>,
    ) -> Result<Worker<'h>> {
        let log = AuditLog::new(host.audit(options.audit)?);
        let place = Place { host, model, options, log };
        let left = host.indices();
        let plan = place.first_plan()?;
        let copies = place.load(&plan, &left)?;
        let worker = Worker {
            place,
            copies,
            answers: BTreeMap::new(),
            left,
            looked: Instant::now(),
            listened: Instant::now(),
            pause: 1,
            troubled: Instant::now(),
            unblamed: 0,
            shared,
        };
        worker.describe();
        worker.report();
        Ok(worker)
    }

    /// Answers until nobody can ask.
    pub(crate) fn work(&mut self, orders: &Receiver<Order>) {
        loop {
            if !self.take_orders(orders) {
                break;
            }
            if let Err(error) = self.turn() {
                self.fail_all(&error);
                break;
            }
        }
        self.fail_answers("the service has ended");
        // Nobody can ask any more; whoever has is told.
        for order in orders.try_iter() {
            self.refuse(order.deliver, "the service has ended");
        }
    }

    /// Takes what has come; waits for it where there is nothing else to do. False if nobody can ask any more.
    fn take_orders(&mut self, orders: &Receiver<Order>) -> bool {
        loop {
            let order = match self.is_idle() {
                true => match orders.recv_timeout(QUIET) {
                    Ok(order) => order,
                    Err(RecvTimeoutError::Timeout) => {
                        self.idle();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => return false,
                },
                false => match orders.try_recv() {
                    Ok(order) => order,
                    Err(TryRecvError::Empty) => return true,
                    Err(TryRecvError::Disconnected) => return false,
                },
            };
            self.take(order);
        }
    }

    /// Whether nobody asks, and no step is under way that was begun for somebody who has gone.
    fn is_idle(&self) -> bool {
        self.answers.is_empty() && self.copies.iter().all(|copy| copy.oldest().is_none())
    }

    /// Nobody asks: ranks hear that there is more to come, cards that have gone are missed before somebody needs them, and
    /// those that were lost may be back.
    fn idle(&mut self) {
        for copy in &mut self.copies {
            // A rank that is gone is found by the next step.
            let _ = copy.heartbeat();
        }
        if let Err(error) = self.miss().and_then(|()| self.welcome_back()) {
            self.fail_all(&error);
        }
        self.report();
    }

    /// Goes on without a card that has gone while nobody needed it; what was asked last is known now.
    fn miss(&mut self) -> Result<()> {
        if self.listened.elapsed() < LISTEN {
            return Ok(());
        }
        self.listened = Instant::now();
        let missed = self.place.host.backend().missed(&self.left);
        missed.map_or(Ok(()), |error| self.recover(error))
    }

    /// A request takes its place in the queue of the copy with the fewest.
    fn take(&mut self, order: Order) {
        let Order { id, ask, deliver } = order;
        let (prompt, reuses) = (ask.prompt.clone(), ask.reuse && self.place.options.reuse);
        let Some(copy) = self.copies.iter_mut().min_by_key(|copy| copy.load()) else {
            return self.refuse(deliver, "no cards are left");
        };
        match Answer::new(ask, deliver, self.place.model, self.place.options.draft) {
            Ok(answer) => {
                copy.schedule.add(id, prompt, reuses);
                self.answers.insert(id, answer);
            }
            Err((error, mut deliver)) => {
                deliver(Update::Failed { what: error.to_string(), is_request: true });
                self.shared.update(|status| {
                    status.waiting -= 1;
                    status.failed += 1;
                });
            }
        }
    }

    /// Begins and ends steps, once.
    fn turn(&mut self) -> Result<()> {
        self.drop_stopped();
        // Copies that have something to do find out by their steps.
        if self.copies.iter().any(|copy| copy.load() == 0) {
            self.miss()?;
        }
        self.welcome_back()?;
        if let Err(error) = self.step() {
            self.recover(error)?;
        }
        self.report();
        Ok(())
    }

    fn step(&mut self) -> Result<(), LlmError> {
        for at in 0..self.copies.len() {
            let copy = &mut self.copies[at];
            for (id, cached) in copy.admit() {
                let Some(answer) = self.answers.get_mut(&id) else { continue };
                if answer.begin(cached) {
                    let prompt = answer.prompt_tokens();
                    self.shared.update(|status| {
                        status.waiting -= 1;
                        status.running += 1;
                        status.prompt_tokens += (prompt - cached) as u64;
                        status.cached_tokens += cached as u64;
                    });
                }
            }
            let answers = &self.answers;
            let want = |id: SequenceId| answers.get(&id).map(Answer::want);
            let guess = |id: SequenceId, most: usize| {
                answers.get(&id).map(|answer| answer.guess(most)).unwrap_or_default()
            };
            self.copies[at].begin_steps(&Asking { want: &want, guess: &guess })?;
        }
        // The copy whose step began first is waited for; the others work on.
        let first =
            self.copies.iter().enumerate().filter_map(|(at, copy)| Some((copy.oldest()?, at)));
        let Some((_, at)) = first.min() else { return Ok(()) };
        let copy = &mut self.copies[at];
        let (asked, outcome, took) = copy.end_step()?;
        self.shared.update(|status| {
            status.steps += 1;
            status.step_seconds.0 += took[0];
            status.step_seconds.1 += took[1];
        });
        self.give_out(at, asked, outcome);
        Ok(())
    }

    /// What came of a step goes to those who asked.
    fn give_out(&mut self, at: usize, asked: Vec<Asked>, outcome: Outcome) {
        let mut outputs = outcome.outputs.into_iter();
        for asked in asked {
            let own: Vec<Output> = outputs.by_ref().take(1 + asked.guesses.len()).collect();
            let Some(id) = asked.id else { continue };
            let accepted = self.give(at, id, &own, &asked.guesses);
            let copy = &mut self.copies[at];
            copy.schedule.settle(id);
            copy.note_accepted(accepted);
            if let Some(answer) = self.answers.get_mut(&id) {
                answer.note_guesses(asked.guesses.len(), accepted);
            }
            if !asked.guesses.is_empty() {
                let guessed = asked.guesses.len() as u64;
                let accepted = accepted as u64;
                let counts = DraftCounts { steps: 1, guessed, accepted };
                self.shared.update(|status| status.draft = status.draft.plus(counts));
            }
        }
    }

    /// What a step gave for one sequence goes to whoever asked: what follows its last token, and then what follows each
    /// guess, as long as these are right. Gives how many were.
    fn give(&mut self, at: usize, id: SequenceId, outputs: &[Output], guesses: &[u32]) -> usize {
        let tokenizer = self.place.model.tokenizer();
        let context = self.place.options.context;
        for (accepted, output) in outputs.iter().enumerate() {
            let Some(answer) = self.answers.get_mut(&id) else { return accepted };
            let given = answer.next(output, tokenizer, context);
            let schedule = &mut self.copies[at].schedule;
            match given {
                Ok(Some(token)) => {
                    schedule.push(id, token);
                    let guessed = guesses.get(accepted) == Some(&token);
                    if guessed {
                        schedule.accept(id);
                    }
                    self.shared.update(|status| status.tokens += 1);
                    if !answer.is_heard() {
                        self.end(id, |status| status.cancelled += 1);
                    }
                    if !guessed {
                        return accepted;
                    }
                }
                Ok(None) => {
                    answer.complete();
                    self.end(id, |status| {
                        status.tokens += 1;
                        status.answered += 1;
                    });
                    return accepted;
                }
                Err(error) => {
                    let what = error.to_string();
                    answer.deliver(Update::Failed { what, is_request: true });
                    self.end(id, |status| status.failed += 1);
                    return accepted;
                }
            }
        }
        outputs.len().min(guesses.len())
    }

    /// A request is over.
    fn end(&mut self, id: SequenceId, count: impl FnOnce(&mut super::Status)) {
        if let Some(answer) = self.answers.remove(&id) {
            self.copies.iter_mut().for_each(|copy| copy.schedule.remove(id));
            let waited = !answer.has_begun();
            self.shared.update(|status| {
                let place = if waited { &mut status.waiting } else { &mut status.running };
                *place -= 1;
                count(status);
            });
        }
    }

    /// Whoever has stopped listening, or was stopped, leaves.
    fn drop_stopped(&mut self) {
        let stopped = self.answers.iter().filter(|(_, answer)| answer.is_stopped());
        let stopped: Vec<SequenceId> = stopped.map(|(id, _)| *id).collect();
        for id in stopped {
            if let Some(answer) = self.answers.get_mut(&id) {
                answer.finish(FinishReason::Stopped);
            }
            self.end(id, |status| status.cancelled += 1);
        }
    }

    /// Everybody's tokens are computed again on the cards that are left.
    fn recover(&mut self, mut error: LlmError) -> Result<()> {
        let (host, backend) = (self.place.host, self.place.host.backend());
        let observer = &**host.observer();
        let begun = Instant::now();
        if self.troubled.elapsed() > CALM {
            (self.pause, self.unblamed) = (1, 0);
        }
        (self.looked, self.troubled) = (begun, begun);
        for _ in 0..=2 * host.card_count() {
            let Some(left) = backend.survivors(&error, &self.left) else {
                return Err(host.explain(error));
            };
            host.tell_lost(&error, &left);
            if casts_doubt(&error) {
                self.doubt(&error);
            }
            let lost = self.left.len() - left.len();
            self.shared.update(|status| status.cards_lost += lost as u64);
            self.left = left;
            self.unblamed = if lost > 0 { 0 } else { self.unblamed + 1 };
            if self.unblamed > MOST_AGAIN {
                // The same would follow from the same.
                return Err(host.explain(error));
            }
            match self.lay_out_again() {
                Ok(()) => {
                    let tokens = self.answers.values().map(Answer::length).sum();
                    let plan = self.copies[0].plan();
                    observer(&Event::Resumed { plan, after: begun.elapsed(), tokens });
                    self.describe();
                    return Ok(());
                }
                // Another card was lost while the model was brought onto these.
                Err(EngineError::Run(again)) => error = again,
                Err(_) if backend.lack_one(&self.left) => {}
                Err(error) => return Err(error),
            }
        }
        Err(host.explain(error))
    }

    /// What was given out may be wrong: it is computed again from the prompts.
    fn doubt(&mut self, error: &LlmError) {
        let blamed = error.to_string();
        self.answers.values_mut().for_each(|answer| answer.restart(&blamed));
    }

    /// Brings the model onto the cards that are left, with everybody in the queue again.
    fn lay_out_again(&mut self) -> Result<()> {
        let host = self.place.host;
        // Their memory is free for what comes.
        for mut copy in self.copies.drain(..) {
            copy.release();
        }
        let request = self.place.request(None);
        let plan = self.place.fitting(&|blocks| {
            let request = spanker_plan::Request { blocks, ..request.clone() };
            host.backend().replan(&self.left, self.place.model, request)
        })?;
        self.copies = self.place.load(&plan, &self.left)?;
        for (turn, (id, answer)) in self.answers.iter().enumerate() {
            let at = turn % self.copies.len();
            let (tokens, reuses) = (answer.sequence(), answer.reuses(self.place.options.reuse));
            let schedule = &mut self.copies[at].schedule;
            match answer.has_spoken() {
                true => schedule.resume(*id, tokens, reuses),
                false => schedule.add(*id, tokens, reuses),
            }
        }
        let again = self.answers.values().filter(|answer| answer.has_begun()).count() as u64;
        self.shared.update(|status| status.recomputed += again);
        Ok(())
    }

    /// Cards that were lost and are there again are taken in.
    fn welcome_back(&mut self) -> Result<()> {
        let all = self.place.host.indices();
        if self.left.len() == all.len() || self.looked.elapsed() < self.pause * LOOK {
            return Ok(());
        }
        self.looked = Instant::now();
        let Some(left) = self.place.host.backend().returned(&self.left) else { return Ok(()) };
        self.pause = (2 * self.pause).min(MOST_PAUSE);
        let before = std::mem::replace(&mut self.left, left);
        let back = (self.left.len() - before.len()) as u64;
        match self.lay_out_again() {
            Ok(()) => self.shared.update(|status| status.cards_back += back),
            // It has gone again; the others go on.
            Err(_) => {
                self.left = before;
                match self.lay_out_again() {
                    Err(EngineError::Run(error)) => return self.recover(error),
                    // One of the others was lost meanwhile.
                    Err(error) => match self.whoever_is_missed() {
                        Some(missed) => return self.recover(missed),
                        None => return Err(error),
                    },
                    Ok(()) => {}
                }
            }
        }
        self.describe();
        Ok(())
    }

    /// What is wrong with a card that nothing is heard of, if there is one.
    fn whoever_is_missed(&self) -> Option<LlmError> {
        let backend = self.place.host.backend();
        let begun = Instant::now();
        while backend.lack_one(&self.left) && begun.elapsed() < MISSED {
            // It is looked for beside what else goes on.
            match backend.missed(&self.left) {
                None => std::thread::sleep(MISSED / 1000),
                found => return found,
            }
        }
        None
    }

    /// Nothing runs any more.
    fn fail_all(&mut self, error: &EngineError) {
        let what = error.to_string();
        self.shared.update(|status| status.broken = Some(what.clone()));
        self.fail_answers(&what);
    }

    fn fail_answers(&mut self, what: &str) {
        let ids: Vec<SequenceId> = self.answers.keys().copied().collect();
        for id in ids {
            if let Some(answer) = self.answers.get_mut(&id) {
                answer.deliver(Update::Failed { what: what.to_owned(), is_request: false });
            }
            self.end(id, |status| status.failed += 1);
        }
    }

    /// A request that never had its turn.
    fn refuse(&self, mut deliver: Delivery, what: &str) {
        deliver(Update::Failed { what: what.to_owned(), is_request: false });
        self.shared.update(|status| {
            status.waiting -= 1;
            status.failed += 1;
        });
    }

    /// Writes down what is under way.
    fn report(&self) {
        let put_back = self.copies.iter().map(|copy| copy.schedule.put_back()).sum::<u64>();
        let kv = self.copies.iter().map(Copy::blocks);
        let kv = kv.reduce(|sum, one| sum.plus(one)).unwrap_or_default();
        let rates = self.copies.iter().map(Copy::rates);
        let rate = rates.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let card_seconds: Vec<f64> =
            self.copies.iter().map(|copy| copy.card_seconds().unwrap_or(0.0)).collect();
        let shown = self.copies.iter().any(|copy| copy.card_seconds().is_some());
        self.shared.update(|status| {
            (status.kv, status.rate) = (kv, rate);
            status.card_seconds = if shown { card_seconds } else { Vec::new() };
            status.put_back = put_back;
            for copy in &self.copies {
                copy.describe_times(&self.left, &mut status.cards);
            }
        });
    }

    /// Writes down which card has what.
    fn describe(&self) {
        let cards = self.place.cards(&self.copies, &self.left);
        let expected = self.place.expected(&self.copies);
        let links = self.place.links(&self.copies, &self.left);
        self.shared.set_pacings(pacings(&self.copies));
        self.shared.update(|status| {
            status.fabric = self.place.host.fabric().name();
            status.copies = self.copies.len();
            status.layout = self.place.words(&self.copies);
            (status.cards, status.links, status.expected) = (cards, links, expected);
        });
    }
}
