// SPDX-License-Identifier: Apache-2.0
//! `spanker eval`: how well a model knows texts, in bits per byte, and how often it would have said them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use spanker_engine::eval::{Evaluation, Tally};
use spanker_engine::{Engine, EngineError, models};
use spanker_twin::Signals;

use crate::llm::{Place, PlaceArgs};
use crate::{output, refuse};

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
    pub(crate) on: PlaceArgs,
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

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.limit == Some(0) {
        return refuse("--limit 0: at least one item is scored");
    }
    let signals = Signals::take()?;
    args.on.lead(None, |place| lead(args, place, &signals))
}

fn lead(args: &Args, place: &Place, signals: &Signals) -> anyhow::Result<()> {
    let Place { host, model, context, .. } = place;
    let items = (&*models::find_data(&args.items)?, args.limit.unwrap_or(usize::MAX));
    let kept = (*context, args.on.llm.kv.name());
    let mut found = Evaluation::open(items, model, kept, args.out.as_deref())?;
    let (begun, all) = (Instant::now(), found.all());
    if let Some(longest) = found.longest() {
        let request = place.request(longest.clamp(1, context - 1), 1);
        let plan = host.plan(model, &request, &args.on.wish())?;
        let mut engine = Engine::load(host, model, plan)?;
        let scored = found.run(&mut engine, |tally| {
            if tally.items > 0 {
                output::progress_of(tally.items as u64, all as u64, &tally.words());
            }
            !signals.caught().end
        });
        output::progress_done();
        scored.inspect_err(|error| note_end(args, error, &found.tally, all))?;
    }
    report(args, place, &found, begun.elapsed())
}

/// Says how far it came if it was interrupted.
fn note_end(args: &Args, error: &EngineError, tally: &Tally, all: usize) {
    if tally.items > 0 && error.is_interrupt() {
        let kept = args.out.as_ref().map_or_else(
            || "; with --out the same command would go on from here".to_owned(),
            |out| format!("; the same command goes on with what {} has", out.display()),
        );
        output::note(format_args!("{} of {all} items: {}{kept}", tally.items, tally.words()));
    }
}

fn report(args: &Args, place: &Place, found: &Evaluation, time: Duration) -> anyhow::Result<()> {
    let (name, Evaluation { of, tally, resumed, .. }) = (&place.model.shape().name, found);
    if args.json {
        let mut json = json!({
            "model": name, "items_from": args.items, "resumed": resumed,
            "bits_per_byte": tally.bits_per_byte(), "accuracy": tally.accuracy(),
            "context": of.context, "kv": of.kv, "model_fingerprint": of.model,
            "items_sha256": of.items, "cards": place.host.card_count(), "seconds": time.as_secs_f64(),
        });
        for (field, value) in serde_json::to_value(tally)?.as_object().into_iter().flatten() {
            json[field] = value.clone();
        }
        return output::json(&json);
    }
    let Tally { items, correct, bytes, tokens, cut, .. } = tally;
    say!("{name}: {} ({correct} of {items} items)", tally.words())?;
    let seconds = time.as_secs_f64();
    let before = match resumed {
        0 => String::new(),
        resumed => format!(", {resumed} of the items before"),
    };
    log!(
        "{tokens} tokens of {bytes} bytes scored with a context of {} and keys and values as {}; {seconds:.1} s{before}",
        of.context,
        of.kv
    );
    if *cut > 0 {
        log!("{cut} contexts were cut at their beginning\nhint: give more room with --ctx-size");
    }
    Ok(())
}
