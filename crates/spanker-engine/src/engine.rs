// SPDX-License-Identifier: Apache-2.0
//! A model on the cards of a host: one sequence, step by step, on the cards that are left when one is lost.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use spanker_llm::{AuditLog, LlmError, MemoryUse, Outcome, Recorder, Session, Want};
use spanker_plan::{Comparison, Plan, Reach, StepPrices};

use crate::draft::{DraftModel, DraftSource};
use crate::error::{EngineError, Result};
use crate::generation::{Generation, Limits, Stop};
use crate::given::casts_doubt;
use crate::host::{Event, Fabric, Host, Load, Loaded};
use crate::model::Model;
use crate::pieces::{self, Compared, Piece};
use crate::profiles;
use crate::sampling::Sampling;
use crate::summary::{Answer, Summary};

/// Tokens from which on a run says something about its machine.
const ENOUGH_STEPS: usize = 8;

/// How a model is loaded, besides its plan.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Whether what cards do is recorded, for a trace.
    pub record: bool,
    /// The part of the cards' work that is computed a second time: see [`Host::audit`].
    pub audit: f64,
    /// Where guesses of what follows come from. A step has room for as many as the plan's request says.
    pub draft: DraftSource,
}

/// A model on cards, and one sequence.
pub struct Engine<'h> {
    host: &'h Host,
    model: &'h Model,
    plan: Plan,
    session: Session<'h>,
    /// The devices' numbers of the cards that are left.
    left: Vec<usize>,
    lost: usize,
    /// The layouts that the run has been on, the present one last.
    pieces: Vec<Piece>,
    memory: Vec<MemoryUse>,
    log: AuditLog,
    /// What ends the generation that is under way.
    stop: Rc<RefCell<Stop>>,
    draft: DraftSource,
    /// What guesses where a model does.
    draft_model: Option<DraftModel>,
    /// What steps take on the present layout, if anybody has asked.
    prices: Option<StepPrices>,
}

impl std::fmt::Debug for Engine<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("host", self.host).finish_non_exhaustive()
    }
}

/// A step whose result may be wrong, as what came before it.
pub(crate) type Doubtful = Result<Outcome, LlmError>;

impl<'h> Engine<'h> {
    /// Brings a model onto the cards of a host, as a plan of that host says.
    ///
    /// # Errors
    /// What loading fails with.
    pub fn load(host: &'h Host, model: &'h Model, plan: Plan) -> Result<Engine<'h>> {
        let audit = plan.request.audit;
        Self::load_with(host, model, plan, Options { record: false, audit, ..Options::default() })
    }

    /// The same, recorded or audited.
    ///
    /// # Errors
    /// What loading fails with.
    pub fn load_with(
        host: &'h Host,
        model: &'h Model,
        plan: Plan,
        options: Options,
    ) -> Result<Engine<'h>> {
        let left = host.indices();
        let (recorder, log) = (options.record.then(Recorder::new), AuditLog::new(options.audit));
        let observer = &**host.observer();
        let load = Load { model, plan: &plan, recorder: recorder.as_ref(), log: &log, observer };
        let loaded = host.backend().load(&left, &load).map_err(|error| host.explain(error))?;
        let pieces = vec![Piece::first(plan.clone(), Vec::new(), recorder)];
        let stop = Rc::new(RefCell::new(Stop::default()));
        let stopped = Rc::clone(&stop);
        let session = Session::new(loaded.runner).with_progress(move |done, total| {
            let ends = done == total || stopped.borrow().is_stopped();
            observer(&if ends { Event::Done } else { Event::Prompt { done, total } });
            !ends
        });
        let memory = numbered(loaded.memory, &left);
        let (draft, prices) = (options.draft, None);
        let (lost, draft_model) = (0, None);
        Ok(Engine {
            host,
            model,
            plan,
            session,
            left,
            lost,
            pieces,
            memory,
            log,
            stop,
            draft,
            draft_model,
            prices,
        })
    }

    /// What it runs by.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &'h Model {
        self.model
    }

    /// The context, in tokens.
    #[must_use]
    pub fn context(&self) -> usize {
        self.plan.request.context as usize
    }

    /// All tokens of the sequence so far.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        self.session.tokens()
    }

    /// What each card was planned to allocate, and what it has.
    #[must_use]
    pub fn memory(&self) -> &[MemoryUse] {
        &self.memory
    }

    /// What was checked of what cards computed, if anything was.
    #[must_use]
    pub fn audit(&self) -> Option<&AuditLog> {
        (self.log.fraction() > 0.0).then_some(&self.log)
    }

    /// Forgets all but the first `length` tokens of the sequence.
    pub fn cut(&mut self, length: usize) {
        self.session.cut(length);
    }

    /// Guesses come from a model from now on, as many for a step as the plan's request has room for.
    pub fn set_draft_model(&mut self, model: DraftModel) {
        (self.draft, self.draft_model) = (DraftSource::Model, Some(model));
    }

    /// What guesses, where a model does.
    #[must_use]
    pub fn draft_model(&self) -> Option<&DraftModel> {
        self.draft_model.as_ref()
    }

    pub(crate) fn draft_model_mut(&mut self) -> Option<&mut DraftModel> {
        self.draft_model.as_mut()
    }

    /// Guesses come from there from now on, as many for a step as the plan's request has room for.
    pub fn set_draft(&mut self, draft: DraftSource) {
        self.draft = draft;
    }

    /// Whether the model is on cards: it is on none any more when those that are left after a loss are too few.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.session.is_ready()
    }

    /// Lets ranks know that there is more to come: they lose timeout with a leader that says nothing.
    ///
    /// # Errors
    /// [`EngineError::Run`] if a rank does not answer.
    pub fn heartbeat(&mut self) -> Result<()> {
        Ok(self.session.heartbeat()?)
    }

    /// Adds tokens to the sequence and runs them, on the cards that are left when one is lost.
    ///
    /// # Errors
    /// What a step fails with; a card that computes wrongly is an error, because what came before may be wrong, too.
    pub fn feed(&mut self, tokens: &[u32], want: Want) -> Result<Outcome> {
        self.try_feed(tokens, want)?.map_err(|error| self.host.explain(error))
    }

    /// Adds a prompt to the sequence and generates what follows, piece by piece.
    ///
    /// # Errors
    /// [`EngineError::Request`] for an empty prompt or no token to generate, [`EngineError::Text`] for settings that
    /// make no sense.
    pub fn generate<'e>(
        &'e mut self,
        prompt: &[u32],
        sampling: Sampling,
        limits: Limits,
    ) -> Result<Generation<'e, 'h>> {
        Generation::new(self, prompt, sampling, limits)
    }

    /// The inner error casts doubt on all that was computed.
    pub(crate) fn try_feed(&mut self, tokens: &[u32], want: Want) -> Result<Doubtful> {
        match self.session.feed(tokens, want) {
            Ok(outcome) => Ok(Ok(outcome)),
            Err(error @ LlmError::Stopped { .. }) => Err(error.into()),
            Err(error) if casts_doubt(&error) => Ok(Err(error)),
            Err(error) => self.recover(error, want, true),
        }
    }

    /// Runs a token with guesses of what follows: see [`Session::check`]. On other cards, when one is lost, without them.
    pub(crate) fn try_check(
        &mut self,
        token: u32,
        guesses: &[u32],
        want: Want,
    ) -> Result<Doubtful> {
        match self.session.check(token, guesses, want) {
            Ok(outcome) => Ok(Ok(outcome)),
            Err(error) if casts_doubt(&error) => Ok(Err(error)),
            Err(error) => self.recover(error, want, true),
        }
    }

    /// Whether a token is the next guess of the last step: then it is part of the sequence.
    pub(crate) fn accept(&mut self, token: u32) -> bool {
        self.session.accept(token)
    }

    /// The next guess of the last step that may still be right.
    pub(crate) fn guessed(&self) -> Option<u32> {
        self.session.guessed()
    }

    /// Where guesses come from.
    pub(crate) fn draft(&self) -> DraftSource {
        self.draft
    }

    /// Guesses that the next step has room for behind its token.
    pub(crate) fn room_for_guesses(&self) -> usize {
        let request = &self.plan.request;
        let rows = (request.outputs_for(1) as usize).saturating_sub(1);
        // The token itself takes a place, and what follows the last guess does not.
        rows.min(self.context().saturating_sub(self.tokens().len() + 1))
    }

    /// What a step of so many rows takes behind the tokens that there are, in seconds.
    pub(crate) fn price(&mut self, rows: usize) -> f64 {
        let past = self.session.tokens().len() as u64;
        let prices = self.prices.get_or_insert_with(|| StepPrices::new(&self.plan));
        let rows = rows as u64;
        prices.time(rows, rows, &Reach::of([(rows, past)])).0
    }

    /// Cards that were lost so far.
    pub(crate) fn lost(&self) -> usize {
        self.lost
    }

    /// What ends a prompt between two of its pieces, until this is called again.
    pub(crate) fn stop_by(&self, stop: &Stop) {
        self.stop.replace(stop.clone());
    }

    /// What an answer begins with: the sequence with its prompt. A recording is of all answers, from the first prompt on.
    pub(crate) fn begin(&mut self, tokens: &[u32]) {
        if self.pieces.iter().all(|piece| piece.recorder.is_none()) {
            // Every answer has a prediction of its own.
            self.pieces = vec![Piece { tokens: tokens.to_vec(), ..self.piece() }];
        } else if let [first] = &mut self.pieces[..]
            && first.tokens.is_empty()
        {
            first.tokens = tokens.to_vec();
        }
    }

    /// Lays the model out over the cards that are left and computes everything again there. Shares and splits that
    /// were asked for were for the cards that there were. With `given`, tokens were chosen since the prompt: a card that
    /// then turns out to be wrong casts doubt on them.
    pub(crate) fn recover(
        &mut self,
        mut error: LlmError,
        want: Want,
        given: bool,
    ) -> Result<Doubtful> {
        let (host, backend) = (self.host, self.host.backend());
        let observer = &**host.observer();
        for _ in 0..=2 * host.card_count() {
            let Some(left) = backend.survivors(&error, &self.left) else {
                return Err(host.explain(error));
            };
            let begun = Instant::now();
            self.session.release();
            if let Some(piece) = self.pieces.last_mut() {
                piece.collect(backend)?;
            }
            host.tell_lost(&error, &left);
            self.lost += self.left.len() - left.len();
            self.left = left;
            let request = self.plan.request.clone();
            self.prices = None;
            self.plan = match backend.replan(&self.left, self.model, request) {
                Ok(plan) => plan,
                // Another card was lost while the plan was made.
                Err(_) if backend.lack_one(&self.left) => continue,
                Err(error) => return Err(error),
            };
            let mut piece = self.piece();
            let load = Load {
                model: self.model,
                plan: &self.plan,
                recorder: piece.recorder.as_ref(),
                log: &self.log,
                observer,
            };
            let resumed = backend.load(&self.left, &load).and_then(|Loaded { runner, memory }| {
                self.memory = numbered(memory, &self.left);
                piece.recovery = begun.elapsed();
                self.pieces.push(piece);
                self.session.go_on(runner, want)
            });
            match resumed {
                Ok(outcome) => {
                    let (after, tokens) = (begun.elapsed(), self.session.tokens().len());
                    observer(&Event::Resumed { plan: &self.plan, after, tokens });
                    return Ok(Ok(outcome));
                }
                Err(again) if given && casts_doubt(&again) => return Ok(Err(again)),
                Err(again) => error = again,
            }
        }
        Err(host.explain(error))
    }

    /// The piece of the run that begins now, on the cards that are left.
    fn piece(&self) -> Piece {
        let all = self.host.indices();
        let number = |index: &usize| {
            let at = all.iter().position(|known| known == index);
            at.map_or(u32::MAX, |at| at as u32)
        };
        let before = self.pieces.last().and_then(|piece| piece.recorder.as_ref());
        Piece {
            plan: self.plan.clone(),
            tokens: self.session.tokens().to_vec(),
            recorder: before.map(Recorder::successor),
            cards: self.left.iter().map(number).collect(),
            recovery: std::time::Duration::ZERO,
        }
    }

    /// An answer beside its prediction: that of the layout, position and machine that ran.
    ///
    /// # Errors
    /// [`EngineError::Plan`] if a plan cannot be priced for the steps that there were.
    pub fn summary<'a>(&'a self, answer: &'a Answer) -> Result<Summary<'a>> {
        let prompt = answer.past_tokens + answer.prompt_tokens;
        let begun = |tokens: usize| answer.steps_before(tokens);
        let (number, steps) =
            pieces::last_with_steps(&self.pieces, prompt, answer.steps.len(), &begun);
        let reader = &self.pieces[pieces::reader_of(&self.pieces, prompt)];
        let positions = answer.tokens_at(steps.start)..answer.tokens_at(steps.end);
        let mut prediction = self.pieces[number].priced(prompt, &positions)?.predict();
        prediction.ttft = reader.priced(prompt, &positions)?.predict_first().ttft;
        // What was on the cards already was not run again, unless one was lost.
        let known = answer.past_tokens.min(reader.tokens.len());
        if known > 0 && self.pieces.len() == 1 {
            let before = reader.priced(known, &positions)?;
            prediction.ttft.0 -= before.predict_first().ttft.0;
            // Of two long prompts that were priced in other pieces not even a token may be left.
            prediction.ttft.0 = prediction.ttft.0.max(prediction.token.0);
        }
        let (memory, place, lost) = (&self.memory[..], self.host.rank_place(), self.lost);
        let audit = self.audit();
        let (plan, numbers) = (&self.plan, &self.left[..]);
        Ok(Summary { answer, plan, prediction, lost, steps, place, memory, numbers, audit })
    }

    /// Forgets what was measured of threads if an answer took another time than it should have. Says in percent how much
    /// slower it was, if something was forgotten: the next plan is made from a new measurement.
    #[must_use]
    pub fn doubt(&self, summary: &Summary<'_>) -> Option<f64> {
        if self.host.fabric() != Fabric::Inproc || summary.steps.len() < ENOUGH_STEPS {
            return None;
        }
        let predicted = 1.0 / summary.prediction.tokens_per_second;
        if summary.plain_steps().count() < ENOUGH_STEPS {
            return None;
        }
        let measured = summary.middle().time().as_secs_f64();
        profiles::doubt(self.model, &self.plan, self.host.thread_count(), predicted, measured)
    }

    /// Ends the run: what cards did is collected, and the cards are free for another. What is left says how it went.
    ///
    /// # Errors
    /// [`EngineError::Run`] if ranks do not hand over what they recorded.
    pub fn finish(self) -> Result<Finished> {
        let Engine { host, mut pieces, session, .. } = self;
        drop(session);
        if let Some(last) = pieces.last_mut() {
            last.collect(host.backend())?;
        }
        Ok(Finished { pieces })
    }
}

/// What cards allocate, by the devices' numbers.
fn numbered(mut memory: Vec<MemoryUse>, numbers: &[usize]) -> Vec<MemoryUse> {
    for one in &mut memory {
        one.card = numbers.get(one.card).copied().unwrap_or(one.card);
    }
    memory
}

/// A run that is over, with what was recorded of it.
#[derive(Debug)]
pub struct Finished {
    pieces: Vec<Piece>,
}

impl Finished {
    /// The layouts that it was on, one after the other.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The run beside its own prediction, operator by operator.
    ///
    /// # Errors
    /// [`EngineError::Plan`] if what ran cannot be simulated.
    pub fn compare(&self) -> Result<Compared, EngineError> {
        Compared::new(&self.pieces)
    }

    /// A comparison of this run as JSON, with what each of its pieces ran on.
    #[must_use]
    pub fn comparison_json(&self, comparison: &Comparison) -> serde_json::Value {
        let mut json = comparison.to_json();
        let list = json["pieces"].as_array_mut().into_iter().flatten();
        for (piece, value) in self.pieces.iter().zip(list) {
            value["strategy"] = piece.plan.layout.strategy().name().into();
            value["from_token"] = piece.tokens.len().into();
            value["recovery_wall_ms"] = (piece.recovery.as_secs_f64() * 1e3).into();
        }
        json
    }

    /// What cards did when, as Perfetto shows it.
    #[must_use]
    pub fn to_perfetto(&self) -> String {
        pieces::alone(&self.pieces)
    }
}
