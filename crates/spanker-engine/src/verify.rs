// SPDX-License-Identifier: Apache-2.0
//! Proof that a model gives the same tokens on any number of cards: every split against one card, bit by bit.

use spanker_llm::{
    Bound, Difference, Distance, Evaluator, Fault, LlmError, Outcome, Rounding, RunLogits, Runner,
    Side, Step, WindowCache, examine_reduce, run_logits, run_logits_guessing,
};
use spanker_plan::{Layout, Plan, Request};
use spanker_text::Tokenizer;

use crate::draft::{DraftSource, Lookup};
use crate::error::{EngineError, Result};
use crate::host::Host;
use crate::layout::Split;
use crate::model::Model;

/// One way to run a model.
#[derive(Debug, Clone)]
pub struct Case {
    /// How it is split.
    pub split: Split,
    /// How much each card gets.
    pub shares: Vec<f64>,
    /// What that is in layers and heads.
    pub layout: Layout,
}

impl Case {
    /// Every split over cards with these shares, or `only` one: of one card and of few layers some are the same.
    ///
    /// # Errors
    /// [`EngineError::Request`] for a split that the model cannot have.
    pub fn all(model: &Model, shares: &[f64], only: Option<Split>) -> Result<Vec<Case>> {
        let shape = model.shape();
        let layers = shape.layers.len();
        let wanted = |split: &Split| match (only, shares.len(), split) {
            (Some(only), ..) => *split == only,
            (None, 1, split) => *split == Split::Gather,
            (None, cards, Split::Pipeline) => cards <= layers,
            (None, cards, Split::Mixed) => cards > 2 && layers > 1,
            _ => true,
        };
        let splits = [Split::Gather, Split::Reduce, Split::Pipeline, Split::Mixed];
        let case = |split: Split| {
            let layout = split.layout(shape, shares)?;
            Ok(Case { split, shares: shares.to_vec(), layout })
        };
        splits.into_iter().filter(wanted).map(case).collect()
    }

    /// Whether partial sums are added.
    fn adds(&self) -> bool {
        self.split == Split::Reduce && self.shares.len() > 1
    }
}

/// What came of a case.
#[derive(Debug, Clone)]
pub struct Verdict {
    /// Whether it is as it must be.
    pub holds: bool,
    /// What it is, in words.
    pub words: String,
    /// One word for what is wrong, if anything is.
    pub reason: Option<&'static str>,
    /// Of a reduce split whose logits can be compared: how far it is from one card, and how far it may be.
    pub distance: Option<Distance>,
}

/// What cases are compared with: one card, and for splits that add partial sums what rounding explains.
#[derive(Debug)]
pub struct Verifier<'h> {
    host: &'h Host,
    model: &'h Model,
    request: Request,
    prompt: Vec<u32>,
    count: usize,
    one: RunLogits,
    bound: Option<Result<Bound, Difference>>,
    draft: DraftSource,
}

/// A runner of this process, between whose steps ranks hear that there is more to come.
struct Alongside<'a> {
    inner: Box<dyn Runner + 'a>,
    host: &'a Host,
}

impl Runner for Alongside<'_> {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        match self.host.heartbeat() {
            Err(EngineError::Run(error)) => Err(error),
            _ => self.inner.begin(step),
        }
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        self.inner.end()
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }

    fn windows(&self) -> Option<WindowCache> {
        self.inner.windows()
    }
}

impl<'h> Verifier<'h> {
    /// Runs a prompt and `count` tokens on one card in this process, as often as `cases` need it. `progress` is called with
    /// what comes next.
    ///
    /// # Errors
    /// What runs fail with.
    pub fn new(
        host: &'h Host,
        model: &'h Model,
        request: &Request,
        (prompt, count): (Vec<u32>, usize),
        cases: &[Case],
        progress: &mut dyn FnMut(&str),
    ) -> Result<Verifier<'h>> {
        let threads = host.thread_count();
        let layout = Split::Gather.layout(model.shape(), &[1.0])?;
        progress("one card ..");
        let one = Host::threads(threads, 1)?;
        let plan = one.plan_untimed(model, request, layout.clone())?;
        let alongside =
            |inner, fed| run_logits(Box::new(Alongside { inner, host }), &prompt, count, fed);
        let one = alongside(one.runner(model, &plan)?, None)?;
        let adding = cases.iter().filter(|case| case.adds());
        let bound = match adding.map(|case| case.shares.len()).max() {
            None => None,
            Some(parts) => {
                let mut samples = Vec::new();
                for seed in 0..Bound::SAMPLES {
                    progress(&format!("rounding at random, {seed} of {} ..", Bound::SAMPLES));
                    let rounding = Rounding::Random { seed, parts };
                    let rounded = Evaluator::new(model.network(), &layout, rounding, threads)?;
                    let rounded = rounded.in_context(request.context as usize);
                    samples.push(alongside(Box::new(rounded), Some(&one.tokens))?);
                }
                Some(Bound::new(&one, &samples))
            }
        };
        let request = request.clone();
        let draft = DraftSource::None;
        Ok(Verifier { host, model, request, prompt, count, one, bound, draft })
    }

    /// Lets cards check guesses of what follows, all that there is room for; one card has made its tokens one by one.
    #[must_use]
    pub fn with_draft(mut self, draft: DraftSource) -> Self {
        self.draft = draft;
        self.request.guesses = draft.most();
        self
    }

    /// The same bits with guesses, and how many of these were right.
    fn guessing(&self, plan: &Plan, cards: usize) -> Result<Verdict> {
        let Verifier { host, model, one, .. } = self;
        let mut lookup = Lookup::new();
        let room = plan.request.outputs_for(1).saturating_sub(1) as usize;
        let mut guess = |tokens: &[u32]| {
            let known = lookup.tokens().len();
            tokens[known..].iter().for_each(|&token| lookup.push(token));
            lookup.guess(room).tokens
        };
        let runner = host.runner(model, plan)?;
        let found = run_logits_guessing(runner, &self.prompt, self.count, &mut guess);
        let (found, [guessed, right]) = found.map_err(|error| host.explain(error))?;
        let mut verdict = Verdict::exact(&found, one, cards, model.tokenizer());
        verdict.words += &format!("; {right} of {guessed} guesses were right");
        Ok(verdict)
    }

    /// What one card gives.
    #[must_use]
    pub fn one(&self) -> &RunLogits {
        &self.one
    }

    /// Runs a case on the host's cards, and compares it.
    ///
    /// # Errors
    /// What runs fail with. A case that is not as it must be is none.
    pub fn examine(&self, case: &Case) -> Result<Verdict> {
        let Verifier { host, model, one, .. } = self;
        let (cards, tokenizer) = (case.shares.len(), model.tokenizer());
        let bound = match &self.bound {
            Some(Err(difference)) if case.adds() => {
                return Ok(Verdict::differs(difference, cards, tokenizer));
            }
            Some(Ok(bound)) if case.adds() => Some(bound),
            _ => None,
        };
        let plan = host.plan_untimed(model, &self.request, case.layout.clone())?;
        let go = |fed: Option<&[u32]>| {
            let found = run_logits(host.runner(model, &plan)?, &self.prompt, self.count, fed);
            found.map_err(|error| host.explain(error))
        };
        let Some(bound) = bound else {
            if self.draft != DraftSource::None {
                return self.guessing(&plan, cards);
            }
            return Ok(Verdict::exact(&go(None)?, one, cards, tokenizer));
        };
        let (threads, fed) = (host.thread_count(), Some(&one.tokens[..]));
        let exact = Evaluator::new(model.network(), &case.layout, Rounding::Nearest, threads)?
            .in_context(self.request.context as usize);
        let exact = Box::new(Alongside { inner: Box::new(exact), host });
        let defined = run_logits(exact, &self.prompt, self.count, fed)?;
        let (found, again) = (go(fed)?, go(fed)?);
        let examined = examine_reduce([&found, &again], &defined, one, bound);
        let measured = bound.measure(&found, one).ok();
        Ok(Verdict::reduce(&found, examined, measured, cards, tokenizer))
    }
}

impl Verdict {
    fn holds(words: String, distance: Option<Distance>) -> Verdict {
        Verdict { holds: true, words, reason: None, distance }
    }

    /// A split that must have one card's bits.
    fn exact(
        found: &RunLogits,
        reference: &RunLogits,
        cards: usize,
        tokenizer: &Tokenizer,
    ) -> Verdict {
        match found.difference(reference) {
            None => Self::holds(format!("{:016x}  identical", found.fingerprint()), None),
            Some(difference) => Self::differs(&difference, cards, tokenizer),
        }
    }

    /// A run on so many cards, or what it is measured by, that differs.
    fn differs(difference: &Difference, cards: usize, tokenizer: &Tokenizer) -> Verdict {
        let mut words = difference.to_string();
        if let Difference::NotFinite { side, .. } = difference {
            let cards = if *side == Side::Reference { 1 } else { cards };
            words += &format!(" on {cards} card{}", if cards == 1 { "" } else { "s" });
        }
        if let Some(tokens) = difference.tokens() {
            let [theirs, ours] = tokens.map(|token| tokenizer.decode(&[token]));
            words += &format!("; tokens {theirs:?} and {ours:?}");
        }
        Verdict { holds: false, words, reason: Some(difference.kind()), distance: None }
    }

    /// A reduce split on several cards, and how far it is from one card if that can be measured.
    fn reduce(
        found: &RunLogits,
        examined: Result<Distance, Fault>,
        measured: Option<Distance>,
        cards: usize,
        tokenizer: &Tokenizer,
    ) -> Verdict {
        let distance = match examined {
            Ok(distance) => distance,
            Err(Fault::Reference(difference)) => {
                let verdict = Self::differs(&difference, cards, tokenizer);
                return Verdict { distance: measured, ..verdict };
            }
            Err(fault) => {
                let (words, reason) = (fault.to_string(), Some(fault.kind()));
                return Verdict { holds: false, words, reason, distance: measured };
            }
        };
        let tokens = match distance.other_tokens {
            0 => "same tokens".to_owned(),
            1 => "1 other token, a tie within that".to_owned(),
            others => format!("{others} other tokens, all of them ties within that"),
        };
        let words = format!(
            "{:016x}  repeats; logits within {:.2e} of one card ({:.0} % of what rounding explains), {tokens}",
            found.fingerprint(),
            distance.greatest,
            100.0 * distance.share(),
        );
        Self::holds(words, Some(distance))
    }
}
