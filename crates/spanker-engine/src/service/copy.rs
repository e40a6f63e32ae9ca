// SPDX-License-Identifier: Apache-2.0
//! A copy of the model that a service runs: its runner, what its steps take, and who takes part in them; and how copies
//! get onto cards.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use spanker_llm::{AuditLog, LlmError, Outcome, Part, Runner, Step, Want};
use spanker_plan::{Plan, Request, steps_under_way};

use super::ServiceOptions;
use super::expected;
use super::status::{CardState, CardStatus, KvBlocks};
use crate::batch::{Asked, BlockPool, Pacing, Schedule, SequenceId, StepParts};
use crate::draft::{Guess, MOST_GUESSES, StepTimes};
use crate::error::Result;
use crate::host::{Host, Load};
use crate::layout;
use crate::model::Model;

/// Over how long rates are taken.
const LATELY: Duration = Duration::from_secs(5);

/// A step that is under way.
struct UnderWay {
    parts: StepParts,
    begun: Instant,
    predicted: f64,
}

/// A copy of the model.
pub(crate) struct Copy<'h> {
    plan: Plan,
    runner: Option<Box<dyn Runner + 'h>>,
    pacing: Pacing,
    pub(crate) schedule: Schedule,
    under_way: VecDeque<UnderWay>,
    steps: u64,
    /// What steps took by the cards' clocks, in seconds; nothing where these do not show what work costs.
    card_seconds: Option<f64>,
    /// When the last step was over.
    last: Option<Instant>,
    /// Steps of the last seconds: when they were over, the tokens that they gave, and what they were predicted to take.
    lately: VecDeque<(Instant, usize, f64)>,
    /// The part of each card's time that it waited for others, lately.
    waits: Vec<(usize, f64)>,
    /// The part of the time that there was a step, lately.
    used: f64,
    /// What steps without prompts take, by their rows.
    times: StepTimes,
}

/// What a copy has to know of the sequences that take part in a step.
pub(crate) struct Asking<'a> {
    /// What is asked for after a token of a sequence.
    pub(crate) want: &'a dyn Fn(SequenceId) -> Option<Want>,
    /// Guesses of what follows, at most so many, and how likely each is.
    pub(crate) guess: &'a dyn Fn(SequenceId, usize) -> (Guess, Vec<f64>),
}

impl<'h> Copy<'h> {
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// How much it has to do.
    pub(crate) fn load(&self) -> usize {
        let (running, waiting) = self.schedule.counts();
        running + waiting
    }

    /// Gives its cards up.
    pub(crate) fn release(&mut self) {
        self.runner = None;
        self.under_way.clear();
    }

    /// Lets its cards know that there is more to come: no step may be under way.
    pub(crate) fn heartbeat(&mut self) -> Result<(), LlmError> {
        self.runner.as_mut().map_or(Ok(()), |runner| runner.heartbeat())
    }

    /// What steps took by the cards' clocks, in seconds, where these show what work costs.
    pub(crate) fn card_seconds(&self) -> Option<f64> {
        self.card_seconds
    }

    pub(crate) fn admit(&mut self) -> Vec<(SequenceId, usize)> {
        self.schedule.admit()
    }

    /// When the step began that is waited for next.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.under_way.front().map(|step| step.begun)
    }

    /// Gives the schedule what sequences may go on with, as far as checking it in the next step is worth it.
    fn guess(&mut self, asking: &Asking<'_>) {
        let spare = self.pacing.outputs - self.pacing.parallel.min(self.pacing.outputs);
        // Whoever waits for the first token of an answer waits for no guess of others.
        if spare == 0 || self.schedule.is_reading() {
            return;
        }
        let context = self.plan.request.context as usize;
        let guess = |(id, tokens): (SequenceId, usize)| {
            let most = spare.min(MOST_GUESSES).min(context.saturating_sub(tokens));
            let (guess, chances) = (asking.guess)(id, most);
            (id, guess.tokens, chances)
        };
        let all: Vec<_> = self.schedule.decoding().map(guess).collect();
        if all.iter().all(|(_, guess, _)| guess.is_empty()) {
            return;
        }
        let chances: Vec<Vec<f64>> = all.iter().map(|(.., chances)| chances.clone()).collect();
        let positions = self.schedule.mean_length();
        let counts = self.pacing.guesses(&chances, positions, |rows| self.times.factor(rows));
        for ((id, mut guess, _), count) in all.into_iter().zip(counts) {
            guess.truncate(count);
            self.schedule.guess(id, guess);
        }
    }

    /// Begins as many steps as can be under way.
    pub(crate) fn begin_steps(&mut self, asking: &Asking<'_>) -> Result<(), LlmError> {
        while self.under_way.len() < self.pacing.depth {
            self.guess(asking);
            let (running, _) = self.schedule.counts();
            let budget = self.pacing.budget(running, self.schedule.mean_length());
            let Some(parts) = self.schedule.next(budget) else { return Ok(()) };
            self.schedule.begun(&parts);
            let runner = self.runner.as_mut();
            let runner = runner.ok_or_else(|| LlmError::unsupported("there are no cards"))?;
            let list: Vec<Part<'_>> = parts
                .parts
                .iter()
                .map(|part| {
                    let want =
                        (asking.want)(part.id).filter(|_| part.asks).unwrap_or(Want::Nothing);
                    // Who asks and has gone meanwhile is still given something.
                    let want =
                        if part.asks && want == Want::Nothing { Want::Best(1) } else { want };
                    let of = Part::new(&part.tokens, part.past as u64, &part.blocks, want);
                    let windowed = &part.windowed[..];
                    Part { outputs: part.outputs().max(1) as u64, windowed, ..of }
                })
                .collect();
            let turn = self.steps % self.pacing.depth as u64;
            let StepParts { copies, windowed_copies, .. } = &parts;
            runner.begin(&Step { parts: &list, copies, windowed_copies, turn })?;
            self.steps += 1;
            let [time, pace] = self.pacing.price(&parts);
            let predicted = if self.under_way.is_empty() { time } else { pace };
            self.under_way.push_back(UnderWay { parts, begun: Instant::now(), predicted });
        }
        Ok(())
    }

    /// Waits for the step that began first. Gives who asked, in the order of the outputs, and what it took and was
    /// predicted to take, by the cards' clocks where these show what work costs.
    #[allow(clippy::type_complexity, reason = "who asked, what came, and how long it took")]
    pub(crate) fn end_step(&mut self) -> Result<(Vec<Asked>, Outcome, [f64; 2]), LlmError> {
        let runner = self.runner.as_mut();
        let runner = runner.ok_or_else(|| LlmError::unsupported("there are no cards"))?;
        let outcome = runner.end()?;
        let nothing = || LlmError::unsupported("no step has begun");
        let step = self.under_way.pop_front().ok_or_else(nothing)?;
        let now = Instant::now();
        // In a pipeline steps overlap: a step's time is that since the one before it was over.
        let since = self.last.map_or(step.begun, |last| last.max(step.begun));
        let card = outcome.timing.card.map(|time| time.as_secs_f64());
        let took = card.unwrap_or_else(|| (now - since).as_secs_f64());
        self.card_seconds = card.map(|card| card + self.card_seconds.unwrap_or(0.0));
        self.last = Some(now);
        let asked = self.schedule.done(&step.parts);
        self.note(now, since, asked.len(), step.predicted, &outcome);
        if step.parts.outputs() == step.parts.rows() {
            self.times.note(step.parts.rows(), step.predicted, took);
        }
        Ok((asked, outcome, [took, step.predicted]))
    }

    /// Guesses of the last step were right: as many tokens more.
    pub(crate) fn note_accepted(&mut self, accepted: usize) {
        if let Some((_, tokens, _)) = self.lately.back_mut() {
            *tokens += accepted;
        }
    }

    /// Keeps what happened lately.
    fn note(
        &mut self,
        now: Instant,
        since: Instant,
        tokens: usize,
        predicted: f64,
        outcome: &Outcome,
    ) {
        let whole = outcome.timing.time().as_secs_f64().max(1e-9);
        let first = self.lately.front().map_or(since, |(at, ..)| *at);
        self.lately.push_back((now, tokens, predicted));
        while self.lately.front().is_some_and(|(at, ..)| now - *at > LATELY) {
            self.lately.pop_front();
        }
        let blend = |old: f64, new: f64| 0.9 * old + 0.1 * new;
        let gap = (now - first).as_secs_f64().min(1.0);
        let part = (now - since).as_secs_f64() / gap.max(1e-9);
        self.used = blend(self.used, part.clamp(0.0, 1.0));
        for (card, wait) in &outcome.waits {
            let part = (wait.as_secs_f64() / whole).clamp(0.0, 1.0);
            match self.waits.iter_mut().find(|(known, _)| known == card) {
                Some((_, known)) => *known = blend(*known, part),
                None => self.waits.push((*card, part)),
            }
        }
    }

    /// Tokens in a second lately, and as predicted for the same steps.
    pub(crate) fn rates(&self) -> (f64, f64) {
        let Some((first, ..)) = self.lately.front() else { return (0.0, 0.0) };
        let now = Instant::now();
        let tokens: usize = self.lately.iter().map(|(_, tokens, _)| tokens).sum();
        let predicted: f64 = self.lately.iter().map(|(_, _, seconds)| seconds).sum();
        let since = (now - *first).as_secs_f64().max(1e-3);
        let idle = self.lately.back().is_some_and(|(at, ..)| now - *at > LATELY);
        if idle {
            return (0.0, 0.0);
        }
        (tokens as f64 / since, tokens as f64 / predicted.max(1e-9))
    }

    pub(crate) fn blocks(&self) -> KvBlocks {
        let pool = self.schedule.pool();
        let (total, cached) = (pool.total(), pool.cached());
        let tokens = spanker_model::KV_BLOCK as usize;
        KvBlocks { total, used: total - pool.available(), cached, tokens }
    }

    /// How each of its cards spends its time.
    pub(crate) fn describe_times(&self, left: &[usize], cards: &mut [CardStatus]) {
        let idle = self.last.is_none_or(|last| last.elapsed() > LATELY);
        for (card, wait) in &self.waits {
            let number = left.get(*card).copied();
            let one = cards.iter_mut().find(|one| Some(one.number) == number);
            if let Some(one) = one {
                let used = if idle { 0.0 } else { self.used };
                (one.busy, one.waiting) = (used * (1.0 - wait), used * wait);
            }
        }
    }
}

/// Where a service runs.
pub(crate) struct Place<'h> {
    pub(crate) host: &'h Host,
    pub(crate) model: &'h Model,
    pub(crate) options: &'h ServiceOptions,
    pub(crate) log: AuditLog,
}

impl<'h> Place<'h> {
    /// What is asked of a plan, with so many blocks for keys and values.
    pub(crate) fn request(&self, blocks: Option<u64>) -> Request {
        expected::request(self.options, self.log.fraction(), blocks)
    }

    /// The plan to begin with.
    pub(crate) fn first_plan(&self) -> Result<Plan> {
        expected::first_plan(self.host, self.model, self.options, self.log.fraction())
    }

    /// A plan with the blocks that were asked for, or as many as there is memory for.
    pub(crate) fn fitting(&self, plan: &dyn Fn(Option<u64>) -> Result<Plan>) -> Result<Plan> {
        expected::fitting(self.model.shape(), self.options, plan)
    }

    /// Brings a plan's copies onto cards.
    pub(crate) fn load(&self, plan: &Plan, left: &[usize]) -> Result<Vec<Copy<'h>>> {
        let observer = &**self.host.observer();
        let mut copies = Vec::new();
        for plan in layout::copies(plan)? {
            let load =
                Load { model: self.model, plan: &plan, recorder: None, log: &self.log, observer };
            let loaded = self.host.backend().load(left, &load)?;
            let parallel = plan.request.sequences as usize;
            let depth = loaded.runner.depth().min(parallel).max(1);
            debug_assert!(
                depth as u64 <= steps_under_way(&plan.request, plan.layout.pipeline_stages())
            );
            let (pacing, blocks) = expected::pacing(&plan, depth, self.options.draft.is_eager());
            let pool = BlockPool::new(blocks, self.options.reuse);
            let pool = pool.with_windows(loaded.runner.windows());
            copies.push(Copy {
                runner: Some(loaded.runner),
                pacing,
                schedule: Schedule::new(pool, parallel),
                under_way: VecDeque::new(),
                steps: 0,
                card_seconds: None,
                last: None,
                lately: VecDeque::new(),
                waits: Vec::new(),
                used: 0.0,
                times: StepTimes::default(),
                plan,
            });
        }
        Ok(copies)
    }

    /// What every card has.
    pub(crate) fn cards(&self, copies: &[Copy<'_>], left: &[usize]) -> Vec<CardStatus> {
        let all = self.host.indices();
        let mut list: Vec<CardStatus> = all
            .iter()
            .map(|&number| CardStatus {
                number,
                profile: String::new(),
                state: if left.contains(&number) { CardState::Idle } else { CardState::Lost },
                copy: 0,
                stage: 0,
                layers: 0..0,
                heads: (0, 0),
                bytes: [0; 3],
                capacity: 0,
                busy: 0.0,
                waiting: 0.0,
            })
            .collect();
        for (copy, of) in copies.iter().enumerate() {
            let plan = &of.plan;
            let memory = plan.predict().memory;
            for (stage, part) in plan.layout.stages().enumerate() {
                for (&card, shard) in part.group.cards.iter().zip(&part.group.shards) {
                    let number = left.get(card).copied();
                    let Some(one) = list.iter_mut().find(|one| Some(one.number) == number) else {
                        continue;
                    };
                    one.profile = plan.cluster.profile(card).name.clone();
                    one.state = CardState::Serving;
                    (one.copy, one.stage, one.layers) = (copy, stage, part.layers.clone());
                    let heads = (shard.heads.end - shard.heads.start) as usize;
                    one.heads = (heads, plan.model.heads as usize);
                    if let Some(memory) = memory.iter().find(|memory| memory.card == card) {
                        let footprint = &memory.footprint;
                        one.bytes = [footprint.weights.0, footprint.kv.0, footprint.buffers.0];
                        one.capacity = memory.capacity.0;
                    }
                }
            }
        }
        list
    }

    /// Pairs of cards that exchange.
    pub(crate) fn links(&self, copies: &[Copy<'_>], left: &[usize]) -> Vec<(usize, usize)> {
        let mut links = Vec::new();
        let number = |card: usize| left.get(card).copied().unwrap_or(card);
        for copy in copies {
            let mut before: Option<usize> = None;
            for stage in copy.plan.layout.stages() {
                let cards = &stage.group.cards;
                links.extend(cards.windows(2).map(|pair| (number(pair[0]), number(pair[1]))));
                if cards.len() > 2 {
                    links.push((number(cards[cards.len() - 1]), number(cards[0])));
                }
                links.extend(before.map(|last| (number(last), number(cards[0]))));
                before = cards.last().copied();
            }
        }
        links
    }

    /// How the model is laid out, in words.
    pub(crate) fn words(&self, copies: &[Copy<'_>]) -> String {
        let layouts: Vec<_> = copies.iter().map(|copy| &copy.plan.layout).collect();
        expected::words(&layouts)
    }

    /// Tokens in a second that some numbers of clients will see together.
    pub(crate) fn expected(&self, copies: &[Copy<'_>]) -> Vec<(usize, f64)> {
        expected::rates(&pacings(copies), self.options.context)
    }
}

/// What decides how fast copies are, for whoever wants to know in advance: and each one's blocks.
pub(crate) fn pacings(copies: &[Copy<'_>]) -> Vec<(Pacing, usize)> {
    copies.iter().map(|copy| (copy.pacing.clone(), copy.schedule.pool().total())).collect()
}
