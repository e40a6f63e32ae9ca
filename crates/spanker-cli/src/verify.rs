// SPDX-License-Identifier: Apache-2.0
//! `spanker verify`: every split on every number of cards against one card, bit by bit.

use std::ops::RangeInclusive;
use std::str::FromStr;

use serde_json::{Value, json};
use spanker_engine::{Case, Model, Verdict, Verifier};
use spanker_llm::Distance;

use crate::directory::CardList;
use crate::llm::{self, Place, Split};
use crate::{Usage, output};

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
  spanker verify -m smollm2-135m --workers one,two --key-file key    three machines against one card

The exit code is 0 if everything is as it must be, and 1 if not.")]
pub(crate) struct Args {
    #[command(flatten)]
    llm: llm::Args,
    /// How many cards: a number or a range as in 1..5, both ends included [default: 1..3, all of mpirun or --workers]
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
        (!self.llm.fabric().takes().machines).then_some(CardList::Count(most))
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
    let usual = if args.llm.fabric().takes().machines { ranks..=ranks } else { USUAL };
    let cases = cases(args, &place.model, usual)?;
    let most = cases.iter().map(|case| case.shares.len()).max().unwrap_or(1);
    if most > ranks {
        let text = format!("{most} cards: --fabric {} has {ranks}", place.host.fabric().name());
        return Err(Usage(text).into());
    }
    let Place { host, model, .. } = place;
    let request = place.request(prompt.len(), args.n_predict);
    let run = (prompt, args.n_predict);
    let mut progress = |text: &str| output::progress(text);
    let verifier = Verifier::new(host, model, &request, run, &cases, &mut progress);
    output::progress_done();
    let verifier = verifier?;
    if !args.json {
        let text = model.tokenizer().decode(&verifier.one().tokens);
        let fingerprint = verifier.one().fingerprint();
        output::line(&format!("one card, in process: {fingerprint:016x}  {text:?}"))?;
        if let Some(place) = place.host.rank_place() {
            output::line(&place.words())?;
        }
    }
    let mut failed = 0;
    for case in &cases {
        output::progress(&format!("{} on {} cards ..", case.split.name(), case.shares.len()));
        let verdict = verifier.examine(case);
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

/// Every split on every number of cards that can have it.
fn cases(args: &Args, model: &Model, usual: RangeInclusive<usize>) -> anyhow::Result<Vec<Case>> {
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
    let only = args.split.map(Into::into);
    let cases = all.iter().map(|shares| Case::all(model, shares, only));
    Ok(cases.collect::<Result<Vec<_>, _>>()?.concat())
}

fn tell(args: &Args, case: &Case, verdict: &Verdict, fabric: &str) -> anyhow::Result<()> {
    let name = case.split.name();
    if args.json {
        let mut line = json!({
            "cards": case.shares.len(), "shares": case.shares, "split": name, "fabric": fabric,
            "strategy": case.layout.strategy().name(),
        });
        describe(verdict, &mut line);
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

/// Adds what came of a case to its fields.
fn describe(verdict: &Verdict, line: &mut Value) {
    line["holds"] = verdict.holds.into();
    line["what"] = verdict.words.as_str().into();
    line["reason"] = verdict.reason.into();
    let described = verdict.distance.map(|distance| {
        let Distance { greatest, other_tokens, step, most, mean, .. } = distance;
        let found = json!({ "greatest": greatest, "other_tokens": other_tokens, "step": step,
            "most": most[0], "rms": mean[0] });
        (found, json!({ "step": step, "most": most[1], "rms": mean[1] }))
    });
    (line["distance"], line["bound"]) = described.unwrap_or_default();
}

/// The sentence that says it all.
fn summary(cases: &[Case]) -> String {
    let mut counts: Vec<usize> = cases
        .iter()
        .filter(|case| case.split != spanker_engine::Split::Reduce)
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
