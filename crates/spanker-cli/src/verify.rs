// SPDX-License-Identifier: Apache-2.0
//! `spanker verify`: every split on every number of cards against one card, bit by bit.

mod verdict;

use std::ops::RangeInclusive;
use std::str::FromStr;

use serde_json::json;
use spanker_engine::{EngineError, Host, Model};
use spanker_llm::{
    Bound, Difference, Evaluator, LlmError, Outcome, Rounding, RunLogits, Runner, Step,
    examine_reduce, run_logits,
};
use spanker_plan::Layout;

use crate::directory::CardList;
use crate::llm::{self, Place, Split};
use crate::{Usage, output};
use verdict::Verdict;

/// Prove that a model gives the same tokens on any number of cards
///
/// One card runs a prompt and greedily generates tokens; then every split does the same on every number of
/// cards, and all logits are compared bit by bit at every step. Gather, pipeline and mixed splits must give
/// the same bits. A reduce split adds parts in card order, so its logits may differ in the last bits: it is
/// fed the same tokens, must repeat its own bits, must have the bits that its parts give when the host adds them in
/// card order, and may be no further from one card, in logits and in the tokens that win, than rounding explains.
/// Logits that are missing or not finite fail every split.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker verify -m smollm2-135m --cards 1..5
  spanker verify -m smollm2-135m -ts 3,1
  spanker twin up --cards 3 && spanker verify -m smollm2-135m --cards 1..3 --fabric cards
  spanker verify -m smollm2-135m --fabric cuda       a GPU against the processor, bit for bit
  mpirun -n 3 spanker verify -m smollm2-135m        three processes against one card

The exit code is 0 if everything is as it must be, and 1 if not.")]
pub(crate) struct Args {
    #[command(flatten)]
    llm: llm::Args,
    /// How many cards: a number or a range as in 1..5, both ends included [default: 1..3, all of mpirun]
    #[arg(long, value_name = "RANGE")]
    cards: Option<Counts>,
    /// The text to go on from
    #[arg(short, long, default_value = "The three primary colours are")]
    prompt: String,
    /// Tokens to generate and compare
    #[arg(short, long, default_value_t = 16, value_name = "TOKENS")]
    n_predict: usize,
    /// Only this split
    #[arg(long, value_enum)]
    split: Option<Split>,
    /// Print one JSON object for each case
    #[arg(long)]
    json: bool,
}

/// Numbers of cards.
#[derive(Debug, Clone)]
struct Counts(RangeInclusive<usize>);

impl FromStr for Counts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("'{text}': expected a number of cards, or a range as in 1..5");
        let number = |part: &str| part.parse::<usize>().map_err(|_| bad());
        let (low, high) = match text.split_once("..") {
            None => (number(text)?, number(text)?),
            Some((low, high)) => (number(low)?, number(high.strip_prefix('=').unwrap_or(high))?),
        };
        if low == 0 || high < low || high > 64 {
            return Err(format!("'{text}': expected 1 to 64 cards, the lower number first"));
        }
        Ok(Counts(low..=high))
    }
}

/// One way to run the model.
struct Case {
    split: Split,
    shares: Vec<f64>,
    layout: Layout,
}

impl Case {
    /// Whether partial sums are added.
    fn adds(&self) -> bool {
        self.split == Split::Reduce && self.shares.len() > 1
    }
}

/// What cases are compared with.
struct Reference {
    prompt: Vec<u32>,
    /// One card in process.
    one: RunLogits,
    /// How far rounding can bring a reduce split from it, if there is one.
    bound: Option<Result<Bound, Difference>>,
}

/// A runner of this process, between whose steps ranks hear that there is more to come.
struct Alongside<'a> {
    inner: Box<dyn Runner + 'a>,
    host: &'a Host,
}

impl Runner for Alongside<'_> {
    fn step(&mut self, step: &Step<'_>) -> Result<Outcome, LlmError> {
        match self.host.heartbeat() {
            Err(EngineError::Run(error)) => Err(error),
            _ => self.inner.step(step),
        }
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }
}

impl Args {
    /// Whether this is work for all processes that a launcher has started.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.llm.takes_ranks()
    }

    /// The most cards that a case has, as a list of cards. All ranks are there anyway.
    fn most(&self) -> Option<CardList> {
        let most = match (&self.cards, &self.llm.tensor_split) {
            (_, Some(shares)) => shares.len(),
            (Some(Counts(range)), None) => *range.end(),
            (None, None) => *USUAL.end(),
        };
        (!self.takes_ranks()).then_some(CardList::Count(most))
    }
}

/// Numbers of cards where nobody says.
const USUAL: RangeInclusive<usize> = 1..=3;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    // Shares are those of a case, not of the host.
    let llm = llm::Args { tensor_split: None, ..args.llm.clone() };
    llm::on_host(&llm, args.most().as_ref(), None, |place| check(args, place))
}

/// Every case against one card.
fn check(args: &Args, place: &Place) -> anyhow::Result<()> {
    if args.n_predict == 0 {
        return Err(Usage("--n-predict 0: at least one token is compared".into()).into());
    }
    let prompt = place.encode(&args.prompt)?;
    if prompt.len() + args.n_predict > place.context {
        let (all, context) = (prompt.len() + args.n_predict, place.context);
        anyhow::bail!(
            "{all} tokens do not fit a context of {context}\nhint: give more room with --ctx-size"
        );
    }
    let ranks = place.host.card_count();
    let usual = if args.takes_ranks() { ranks..=ranks } else { USUAL };
    let cases = cases(args, &place.model, usual)?;
    let most = cases.iter().map(|case| case.shares.len()).max().unwrap_or(1);
    if most > ranks {
        let text = format!("{most} cards: --fabric {} has {ranks}", place.host.fabric().name());
        return Err(Usage(text).into());
    }
    let reference = reference(args, place, prompt, &cases)?;
    if !args.json {
        let text = place.model.tokenizer().decode(&reference.one.tokens);
        let fingerprint = reference.one.fingerprint();
        output::line(&format!("one card, in process: {fingerprint:016x}  {text:?}"))?;
        if let Some(place) = place.host.rank_place() {
            output::line(&place.words())?;
        }
    }
    let mut failed = 0;
    for case in &cases {
        output::progress(&format!("{:?} on {} cards ..", case.split, case.shares.len()));
        let verdict = examine(args, place, &reference, case);
        output::progress_done();
        let verdict = verdict?;
        failed += usize::from(!verdict.holds);
        tell(args, case, &verdict, llm::fabric_words(place.host.fabric()))?;
    }
    if failed > 0 {
        anyhow::bail!("{failed} of {} cases differ", cases.len());
    }
    if !args.json {
        output::line(&summary(&cases))?;
    }
    Ok(())
}

/// What something of this process gives, while cards elsewhere wait.
fn on_this_host<'a>(
    place: &'a Place,
    inner: Box<dyn Runner + 'a>,
    prompt: &[u32],
    count: usize,
    fed: Option<&[u32]>,
) -> Result<RunLogits, LlmError> {
    run_logits(Box::new(Alongside { inner, host: &place.host }), prompt, count, fed)
}

/// One card's logits, and what rounding explains if a case adds partial sums.
fn reference(
    args: &Args,
    place: &Place,
    prompt: Vec<u32>,
    cases: &[Case],
) -> anyhow::Result<Reference> {
    let Place { host, model, .. } = place;
    let (network, threads) = (model.network(), host.thread_count());
    let layout = spanker_engine::Split::Gather.layout(model.shape(), &[1.0])?;
    output::progress("one card ..");
    let one = Host::threads(threads, 1)?;
    let plan = one.plan_untimed(model, &place.request(1, 1), layout.clone())?;
    let one = on_this_host(place, one.runner(model, &plan)?, &prompt, args.n_predict, None)?;
    let adding = cases.iter().filter(|case| case.adds());
    let bound = match adding.map(|case| case.shares.len()).max() {
        None => None,
        Some(parts) => {
            let mut samples = Vec::new();
            for seed in 0..Bound::SAMPLES {
                output::progress(&format!("rounding at random, {seed} of {} ..", Bound::SAMPLES));
                let rounding = Rounding::Random { seed, parts };
                let rounded = Evaluator::new(network, &layout, rounding, threads)?;
                let (rounded, fed) = (Box::new(rounded), Some(&one.tokens[..]));
                samples.push(on_this_host(place, rounded, &prompt, args.n_predict, fed)?);
            }
            Some(Bound::new(&one, &samples))
        }
    };
    output::progress_done();
    Ok(Reference { prompt, one, bound })
}

/// Every split on every number of cards that can have it.
fn cases(args: &Args, model: &Model, usual: RangeInclusive<usize>) -> anyhow::Result<Vec<Case>> {
    let model = model.shape();
    let layers = model.layers.len();
    let all = match (&args.cards, &args.llm.tensor_split) {
        (None, Some(shares)) => vec![shares.clone()],
        (Some(Counts(range)), None) => range.clone().map(|count| vec![1.0; count]).collect(),
        (None, None) => usual.map(|count| vec![1.0; count]).collect(),
        (Some(Counts(range)), Some(shares)) if *range == (shares.len()..=shares.len()) => {
            vec![shares.clone()]
        }
        (Some(_), Some(shares)) => {
            let text = format!("--tensor-split has {} shares: leave --cards out", shares.len());
            return Err(Usage(text).into());
        }
    };
    let mut cases = Vec::new();
    for shares in all {
        let splits = [Split::Gather, Split::Reduce, Split::Pipeline, Split::Mixed];
        let wanted = |split: &Split| match args.split {
            Some(only) => *split == only,
            None => match (shares.len(), split) {
                (1, split) => *split == Split::Gather,
                (cards, Split::Pipeline) => cards <= layers,
                (cards, Split::Mixed) => cards > 2 && layers > 1,
                _ => true,
            },
        };
        for split in splits.into_iter().filter(wanted) {
            let layout = spanker_engine::Split::from(split).layout(model, &shares)?;
            cases.push(Case { split, shares: shares.clone(), layout });
        }
    }
    Ok(cases)
}

fn examine(
    args: &Args,
    place: &Place,
    reference: &Reference,
    case: &Case,
) -> anyhow::Result<Verdict> {
    let Place { host, model, .. } = place;
    let (prompt, one, tokenizer) = (&reference.prompt, &reference.one, model.tokenizer());
    let cards = case.shares.len();
    let bound = match &reference.bound {
        Some(Err(difference)) if case.adds() => {
            return Ok(Verdict::differs(difference, cards, tokenizer));
        }
        Some(Ok(bound)) if case.adds() => Some(bound),
        _ => None,
    };
    let defined = match bound {
        None => None,
        Some(_) => {
            let (rounding, threads) = (Rounding::Nearest, host.thread_count());
            let exact = Evaluator::new(model.network(), &case.layout, rounding, threads)?;
            let (exact, fed) = (Box::new(exact), Some(&one.tokens[..]));
            Some(on_this_host(place, exact, prompt, args.n_predict, fed)?)
        }
    };
    let request = place.request(prompt.len(), args.n_predict);
    let plan = host.plan_untimed(model, &request, case.layout.clone())?;
    let go = |fed: Option<&[u32]>| -> anyhow::Result<RunLogits> {
        let runner = host.runner(model, &plan)?;
        let found = run_logits(runner, prompt, args.n_predict, fed);
        found.map_err(|error| host.explain(error).into())
    };
    let (Some(bound), Some(defined)) = (bound, defined) else {
        return Ok(Verdict::exact(&go(None)?, one, cards, tokenizer));
    };
    let (found, again) = (go(Some(&one.tokens))?, go(Some(&one.tokens))?);
    let examined = examine_reduce([&found, &again], &defined, one, bound);
    let measured = bound.measure(&found, one).ok();
    Ok(Verdict::reduce(&found, examined, measured, cards, tokenizer))
}

fn tell(args: &Args, case: &Case, verdict: &Verdict, fabric: &str) -> anyhow::Result<()> {
    let name = format!("{:?}", case.split).to_lowercase();
    if args.json {
        let mut line = json!({
            "cards": case.shares.len(), "shares": case.shares, "split": name, "fabric": fabric,
            "strategy": case.layout.strategy().name(),
        });
        verdict.describe(&mut line);
        return output::line(&line.to_string());
    }
    let shares: Vec<String> = case.shares.iter().map(f64::to_string).collect();
    let uneven = case.shares.windows(2).any(|pair| pair[0] != pair[1]);
    let shares = if uneven { format!(" ({})", shares.join(",")) } else { String::new() };
    let mark = if verdict.holds { "ok" } else { "FAIL" };
    let count = case.shares.len();
    let cards = format!("{count} card{}{shares}", if count == 1 { "" } else { "s" });
    output::line(&format!("{mark:<5} {cards:<14} {name:<9} {}", verdict.words))
}

/// The sentence that says it all.
fn summary(cases: &[Case]) -> String {
    let mut counts: Vec<usize> = cases
        .iter()
        .filter(|case| case.split != Split::Reduce)
        .map(|case| case.shares.len())
        .collect();
    counts.dedup();
    let words: Vec<String> = counts.iter().map(usize::to_string).collect();
    match &words[..] {
        [] => "as close as rounding allows".to_owned(),
        [one] => format!("identical on {one} card{}", if one == "1" { "" } else { "s" }),
        [first @ .., last] => format!("identical on {} and {last} cards", first.join(", ")),
    }
}
