// SPDX-License-Identifier: Apache-2.0
//! `spanker verify`: every split on every number of cards against one card, bit by bit.

use std::ops::RangeInclusive;

use serde_json::{Value, json};
use spanker_engine::{CardList, Case, Split, Verdict, Verifier};
use spanker_llm::Distance;

use crate::llm::{self, DraftArgs, Place};
use crate::{output, ranges, refuse};

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
  spanker verify -m smollm2-135m --draft lookup -n 24    guesses change no bit
  spanker verify -m smollm2-135m --fabric cuda       a GPU against the processor, bit for bit
  mpirun -n 3 spanker verify -m smollm2-135m        three processes against one card
  spanker verify -m smollm2-135m --workers one,two --key-file key    three machines against one card

The exit code is 0 if everything is as it must be, and 1 if not.")]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) llm: llm::Args,
    /// How many cards: a number or a range as in 1..5, both ends included [default: 1..3, all of mpirun or --workers]
    #[arg(long, value_name = "RANGE", value_parser = ranges::cards)]
    cards: Option<RangeInclusive<usize>>,
    /// The text to go on from
    #[arg(short, long, default_value = "The three primary colours are")]
    prompt: String,
    /// Tokens to generate and compare
    #[arg(short, long, default_value_t = 16, value_name = "TOKENS")]
    n_predict: usize,
    #[command(flatten)]
    draft: DraftArgs,
    /// Only this split
    #[arg(long, value_parser = llm::one_of(&Split::ALL, Split::name))]
    split: Option<Split>,
    /// Print one JSON object for each case
    #[arg(long)]
    json: bool,
}

impl Args {
    /// What each card gets in every case, with so many cards where nobody says.
    fn shares(&self, usual: RangeInclusive<usize>) -> anyhow::Result<Vec<Vec<f64>>> {
        match (self.cards.clone(), &self.llm.tensor_split) {
            (Some(range), Some(shares)) if range != (shares.len()..=shares.len()) => {
                let count = shares.len();
                refuse(format!("--tensor-split has {count} shares: leave --cards out"))
            }
            (_, Some(shares)) => Ok(vec![shares.clone()]),
            (range, None) => Ok(range.unwrap_or(usual).map(|count| vec![1.0; count]).collect()),
        }
    }
}

/// Numbers of cards where nobody says.
const USUAL: RangeInclusive<usize> = 1..=3;

/// The most cards of a case.
fn most(shares: &[Vec<f64>]) -> usize {
    shares.iter().map(Vec::len).max().unwrap_or(1)
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let most = most(&args.shares(USUAL)?);
    // All machines are there anyway.
    let cards = (!args.llm.takes().machines).then_some(CardList::Count(most));
    // Shares are those of a case, not of the host.
    let llm = llm::Args { tensor_split: None, ..args.llm.clone() };
    llm::on_host(&llm, cards.as_ref(), None, |place| check(args, place))
}

/// Every case against one card.
fn check(args: &Args, place: &Place) -> anyhow::Result<()> {
    if args.n_predict == 0 {
        return refuse("--n-predict 0: at least one token is compared");
    }
    let prompt = place.encode(&args.prompt)?;
    if prompt.len() + args.n_predict > place.context {
        let (all, context) = (prompt.len() + args.n_predict, place.context);
        anyhow::bail!(
            "{all} tokens do not fit a context of {context}\nhint: give more room with --ctx-size"
        );
    }
    let ranks = place.host.card_count();
    let usual = if args.llm.takes().machines { ranks..=ranks } else { USUAL };
    let shares = args.shares(usual)?;
    let most = most(&shares);
    if most > ranks {
        let fabric = place.host.fabric().name();
        return refuse(format!("{most} cards: --fabric {fabric} has {ranks}"));
    }
    let cases = shares.iter().map(|shares| Case::all(&place.model, shares, args.split));
    let cases = cases.collect::<Result<Vec<_>, _>>()?.concat();
    let Place { host, model, .. } = place;
    let request = place.request(prompt.len(), args.n_predict);
    let run = (prompt, args.n_predict);
    let mut progress = |text: &str| output::progress(text);
    let verifier = Verifier::new(host, model, &request, run, &cases, &mut progress);
    output::progress_done();
    let verifier = verifier?.with_draft(args.draft.of_text()?);
    if !args.json {
        let text = model.tokenizer().decode(&verifier.one().tokens);
        let fingerprint = verifier.one().fingerprint();
        say!("one card, in process: {fingerprint:016x}  {text:?}")?;
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
        tell(args, case, &verdict, place.host.fabric().words())?;
    }
    if failed > 0 {
        anyhow::bail!("{failed} of {} cases differ", cases.len());
    }
    if !args.json {
        output::line(&summary(&cases))?;
    }
    Ok(())
}

fn tell(args: &Args, case: &Case, verdict: &Verdict, fabric: &str) -> anyhow::Result<()> {
    let name = case.split.name();
    if args.json {
        let mut line = json!({
            "cards": case.shares.len(), "shares": case.shares, "split": name, "fabric": fabric,
            "strategy": case.layout.strategy().name(),
        });
        describe(verdict, &mut line);
        return output::json(&line);
    }
    let shares: Vec<String> = case.shares.iter().map(f64::to_string).collect();
    let uneven = case.shares.windows(2).any(|pair| pair[0] != pair[1]);
    let shares = if uneven { format!(" ({})", shares.join(",")) } else { String::new() };
    let mark = if verdict.holds { "ok" } else { "FAIL" };
    let cards = output::count(case.shares.len(), "card") + &shares;
    say!("{mark:<5} {cards:<14} {name:<9} {}", verdict.words)
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
        .filter(|case| case.split != Split::Reduce)
        .map(|case| case.shares.len())
        .collect();
    counts.dedup();
    let words: Vec<String> = counts.iter().map(usize::to_string).collect();
    match &words[..] {
        [] => "as close as rounding allows".to_owned(),
        [_] => format!("identical on {}", output::count(counts[0], "card")),
        [first @ .., last] => format!("identical on {} and {last} cards", first.join(", ")),
    }
}
