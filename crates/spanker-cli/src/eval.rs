// SPDX-License-Identifier: Apache-2.0
//! `spanker eval`: how well a model knows texts, in bits per byte, and how often it would have said them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use spanker_engine::eval::{self, EvalOf, Ledger, Tally};
use spanker_engine::{Engine, files, models};
use spanker_twin::Signals;

use crate::directory::CardList;
use crate::llm::{self, Place, Split};
use crate::{Interrupted, Usage, output};

/// More than any file of items has.
const MOST_ITEMS: u64 = 1 << 30;

/// Measure how well a model knows texts: bits per byte, and accuracy
///
/// Each line of the file is a JSON object with 'context' and 'continuation', or 'prompt' and 'completion', or 'text'. The
/// continuation (or all of the text) is scored: what its tokens cost the model in bits, by its bytes, and whether each of
/// them was the model's first choice. Both are the same on any number of cards, unless the split is reduce. Contexts that
/// do not fit are cut at their beginning.
///
/// With --out what was found of each item is kept, and the same command goes on where it was ended.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker fetch lambada && spanker eval lambada -m smollm2-135m --limit 200
  spanker eval lambada -m model.gguf --out model-lambada.jsonl
  spanker eval own.jsonl -m model.gguf --kv q8_0 --json
  spanker eval own.jsonl -m model.gguf --fabric cards

Of n items of which a part p is right, accuracy is off by about sqrt(p (1 - p) / n).")]
pub(crate) struct Args {
    /// The items: a file of JSON lines, or the name of fetched data
    #[arg(value_name = "FILE")]
    items: String,
    #[command(flatten)]
    llm: llm::Args,
    /// Cards: a number, or for --fabric cards a list as in 0,1,3 [default: 1 in-process, all cards]
    #[arg(long, value_name = "CARDS")]
    cards: Option<CardList>,
    /// How to split the model [default: the planner's best that gives the bits of one card]
    #[arg(long, value_enum)]
    split: Option<Split>,
    /// Only the first N items
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Keep what is found of each item in this file, and go on with what it has
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Whether this is work for all processes that a launcher has started.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.llm.takes_ranks()
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.limit == Some(0) {
        return Err(Usage("--limit 0: at least one item is scored".into()).into());
    }
    let signals = Signals::take()?;
    llm::on_host(&args.llm, args.cards.as_ref(), None, |place| lead(args, place, &signals))
}

fn lead(args: &Args, place: &Place, signals: &Signals) -> anyhow::Result<()> {
    let Place { host, model, context, .. } = place;
    let path = models::find_data(&args.items)?;
    let text = files::read(&path, MOST_ITEMS)?;
    let mut items = eval::read_items(&path, &text)?;
    items.truncate(args.limit.unwrap_or(usize::MAX));
    let of = EvalOf::new(model, &text, *context, args.llm.kv.name());
    let mut tally = Tally::default();
    let mut ledger = None;
    if let Some(out) = &args.out {
        let (opened, scores) = Ledger::open(out, &of)?;
        let known = |line: usize| scores.iter().find(|score| score.line == line);
        items.retain(|item| known(item.line).inspect(|score| tally.add(score)).is_none());
        ledger = Some(opened);
    }
    let (resumed, all) = (tally.items, tally.items + items.len());
    let longest = items.iter().map(|item| item.context.len()).max().unwrap_or(0);
    let request = place.request((longest / 4).clamp(1, context - 1), 1);
    let begun = Instant::now();
    if !items.is_empty() {
        let plan = host.plan(model, &request, &args.llm.wish(args.split))?;
        let mut engine = Engine::load(host, model, plan)?;
        let mut shown = begun;
        for item in &items {
            if signals.caught().end {
                return Err(interrupted(args, &tally, all));
            }
            let score = eval::score(&mut engine, item)?;
            if let Some(ledger) = &mut ledger {
                ledger.keep(&score)?;
            }
            tally.add(&score);
            if shown.elapsed() > Duration::from_millis(500) {
                shown = Instant::now();
                output::progress_of(tally.items as u64, all as u64, &words(&tally));
            }
        }
    }
    output::progress_done();
    report(args, place, &tally, &of, (resumed, begun.elapsed()))
}

/// What is known so far, in a few words.
fn words(tally: &Tally) -> String {
    let (bits, right) = (tally.bits_per_byte(), 100.0 * tally.accuracy());
    format!("{bits:.4} bits per byte, {right:.1} % right")
}

/// Says how far it came.
fn interrupted(args: &Args, tally: &Tally, all: usize) -> anyhow::Error {
    output::progress_done();
    if tally.items > 0 {
        let kept = args.out.as_ref().map_or_else(
            || "; with --out the same command would go on from here".to_owned(),
            |out| format!("; the same command goes on with what {} has", out.display()),
        );
        output::note(format_args!("{} of {all} items: {}{kept}", tally.items, words(tally)));
    }
    Interrupted.into()
}

fn report(
    args: &Args,
    place: &Place,
    tally: &Tally,
    of: &EvalOf,
    (resumed, time): (usize, Duration),
) -> anyhow::Result<()> {
    let name = &place.model.shape().name;
    if args.json {
        let json = json!({
            "model": name, "items_from": args.items, "items": tally.items, "resumed": resumed,
            "bits_per_byte": tally.bits_per_byte(), "accuracy": tally.accuracy(),
            "correct": tally.correct, "bits": tally.bits, "bytes": tally.bytes, "tokens": tally.tokens,
            "cut": tally.cut, "context": of.context, "kv": of.kv, "model_fingerprint": of.model,
            "items_sha256": of.items, "cards": place.host.card_count(), "seconds": time.as_secs_f64(),
        });
        return output::line(&json.to_string());
    }
    let Tally { items, correct, bytes, tokens, cut, .. } = tally;
    output::line(&format!("{name}: {} ({correct} of {items} items)", words(tally)))?;
    let seconds = time.as_secs_f64();
    let before =
        if resumed > 0 { format!(", {resumed} of the items before") } else { String::new() };
    output::said_line(format_args!(
        "{tokens} tokens of {bytes} bytes scored with a context of {} and keys and values as {}; {seconds:.1} s{before}",
        of.context, of.kv
    ));
    if *cut > 0 {
        output::said_line(format_args!(
            "{cut} contexts were cut at their beginning\nhint: give more room with --ctx-size"
        ));
    }
    Ok(())
}
