// SPDX-License-Identifier: Apache-2.0
//! `spanker run`: a prompt through a model that is split over cards, and how fast that was.

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use anyhow::Context;
use spanker_engine::{
    Answer, Compared, Correction, Engine, FinishReason, Finished, Generation, Limits, Sampling,
    Stop, files,
};
use spanker_plan::Comparison;
use spanker_report::Report;

use crate::llm::{self, AuditArgs, DraftArgs, Place, PlaceArgs, SampleArgs};
use crate::{output, refuse, report};

/// More than any prompt has.
const MOST_PROMPT: u64 = 64 << 20;

/// Run a prompt through a model that is split over cards
///
/// The text comes as it is made, on standard output; then, on standard error, how fast prompt and generation were,
/// where a token's time went, and how far that was from the prediction. With --fabric cards a card that dies is named,
/// the model is laid out again over the cards that are left, and the text goes on as it would have.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker fetch smollm2-135m
  spanker run -m smollm2-135m -p 'The three primary colours are' -n 32 --temp 0
  spanker run -m smollm2-135m -p 'Once upon a time' --cards 3 --seed 7
  spanker twin up --cards 4 --profile rev-a && spanker run -m smollm2-135m -p 'Hello' --fabric cards
  spanker run -m model.gguf -p 'Hello' --cards 2 -ts 3,1
  spanker run -m model.gguf -p 'Hello' --fabric cuda
  spanker run -m smollm2-135m -p 'one two three one two' --draft lookup
  spanker run -m model.gguf -f prompt.txt -n -1 --stop 'THE END'
  spanker plan model.gguf --cards 4 --out plan.json && spanker run -m model.gguf -p 'Hello' --plan plan.json
  mpirun -n 3 spanker run -m model.gguf -p 'Hello'             three processes, a card each
  mpirun -n 2 --host one,two spanker run -m model.gguf -p 'Hello' --split pipeline

Without --split the planner chooses, on every fabric, among the splits that give the tokens of one card, by what it has
measured of this machine. 'spanker verify' proves that the tokens are the same.")]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) on: PlaceArgs,
    /// The text to go on from; - reads it from standard input
    #[arg(short, long, required_unless_present = "file")]
    prompt: Option<String>,
    /// Read the prompt from this file
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    /// Tokens to generate at most; -1 goes on until the model ends the text or the context is full
    #[arg(
        short,
        long,
        default_value_t = 128,
        value_name = "TOKENS",
        allow_negative_numbers = true
    )]
    n_predict: i64,
    #[command(flatten)]
    sampling: SampleArgs,
    #[command(flatten)]
    audit: AuditArgs,
    #[command(flatten)]
    draft: DraftArgs,
    /// Run a saved plan: its layout, with the prices of what is here
    #[arg(long, value_name = "FILE", conflicts_with_all = ["split", "tensor_split"])]
    plan: Option<PathBuf>,
    /// Go on after the model has ended the text
    #[arg(long)]
    ignore_eos: bool,
    /// Do not repeat the prompt before the text
    #[arg(long)]
    no_display_prompt: bool,
    /// Save what each card did when, as Perfetto shows it
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Lay the run beside its own prediction, operator by operator, and say where the time differs
    #[arg(long, conflicts_with = "draft")]
    compare: bool,
    /// Write a page about the plan and the run beside its prediction
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Save the logits after the prompt, as little-endian f32s in the order of tokens, to compare with
    /// other runtimes
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl Args {
    /// The text to go on from.
    fn text(&self) -> anyhow::Result<String> {
        match (&self.file, self.prompt.as_deref()) {
            (Some(file), _) => Ok(files::read(file, MOST_PROMPT)?),
            (None, Some("-")) => {
                let mut text = String::new();
                let read = std::io::stdin().lock().take(MOST_PROMPT).read_to_string(&mut text);
                read.context("cannot read the prompt from standard input")?;
                Ok(text)
            }
            (None, text) => Ok(text.unwrap_or_default().to_owned()),
        }
    }

    fn limits(&self) -> anyhow::Result<Limits> {
        let tokens = match self.n_predict {
            -1 => None,
            count if count > 0 => Some(usize::try_from(count)?),
            count => {
                let text = format!("--n-predict {count}: at least one token, or -1 for no limit");
                return refuse(text);
            }
        };
        Ok(Limits {
            tokens,
            ignore_end: self.ignore_eos,
            stops: self.sampling.stops.clone(),
            keep_logits: self.logits.is_some(),
            ..Limits::default()
        })
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let limits = args.limits()?;
    // What other ranks have is not read or written.
    let mut text = String::new();
    if crate::ranks::is_first() {
        files::check_outputs([&args.trace, &args.logits, &args.report])?;
        text = args.text()?;
    }
    args.on.lead(args.plan.as_deref(), |place| lead(args, place, &text, limits))
}

fn lead(args: &Args, place: &Place, text: &str, limits: Limits) -> anyhow::Result<()> {
    let Place { host, model, context, .. } = place;
    let prompt = place.encode(text)?;
    let sampling = args.sampling.sampling()?;
    let steps = limits.tokens.unwrap_or(*context).min(context - prompt.len());
    let request = place.request(prompt.len(), steps);
    let record = args.trace.is_some() || args.compare || args.report.is_some();
    let engine = place.load((&args.audit, &args.draft), request, record, |request| {
        Ok(match &args.plan {
            Some(path) => host.plan_saved(model, request, &llm::saved(path)?)?,
            None => host.plan(model, request, &args.on.wish())?,
        })
    });
    let mut engine = engine?;
    let audience = Audience::of(args.json);
    if !args.no_display_prompt {
        audience.show(text)?;
    }
    let stop = limits.stop.clone();
    let (answer, _) = audience.stream(engine.generate(&prompt, sampling, limits)?, &stop)?;
    finish(args, engine, &answer)
}

/// Who reads a text while it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Audience {
    /// Nobody: it is printed when it is complete.
    Later,
    /// People.
    Terminal,
    /// A file or another program.
    Stream,
}

impl Audience {
    pub(crate) fn of(json: bool) -> Audience {
        match (json, std::io::stdout().is_terminal()) {
            (true, _) => Audience::Later,
            (false, true) => Audience::Terminal,
            (false, false) => Audience::Stream,
        }
    }

    /// Text as it comes, unless it is printed in one piece later.
    fn show(self, text: &str) -> anyhow::Result<()> {
        if self == Audience::Later { Ok(()) } else { output::text(text) }
    }

    /// An answer as it comes. Whoever stops reading ends the text, not the run.
    pub(crate) fn stream(
        self,
        mut generation: Generation<'_, '_>,
        stop: &Stop,
    ) -> anyhow::Result<(Answer, Sampling)> {
        for piece in &mut generation {
            let piece = piece?;
            if let Some(correction) = &piece.corrects {
                self.correct(correction)?;
            }
            self.show(&piece.text)?;
            if output::is_unread() {
                stop.stop();
            }
        }
        Ok(generation.into_answer())
    }

    /// Tells whoever reads that the text is wrong from a token on, or ends with an error if they cannot be told.
    fn correct(self, correction: &Correction) -> anyhow::Result<()> {
        let (number, blamed) = (correction.token + 1, &correction.blamed);
        match self {
            Audience::Later => Ok(()),
            Audience::Terminal => {
                output::line("")?;
                log!(
                    "token {number} and what followed was wrong: {blamed}; the right text from there:"
                );
                Ok(())
            }
            Audience::Stream => anyhow::bail!(
                "token {number} and what follows it in the output is wrong: {blamed}\nhint: --audit 1 computes everything twice before it is printed, and --json prints the right text alone"
            ),
        }
    }
}

/// Files first, then what is printed: whoever stops reading loses no file.
fn finish(args: &Args, engine: Engine<'_>, answer: &Answer) -> anyhow::Result<()> {
    if let (Some(path), Some(logits)) = (&args.logits, &answer.logits) {
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
        files::write(path, bytes)?;
    }
    if let Some(error) = engine.draft_model().and_then(|model| model.failed()) {
        output::note(format_args!("the draft model guesses nothing any more: {error}"));
    }
    let summary = engine.summary(answer)?;
    let (mut json, lines) = (summary.to_json(), summary.lines());
    let doubt = engine.doubt(&summary);
    let finished = engine.finish()?;
    let noted =
        |error: &spanker_engine::EngineError| output::note(format_args!("no comparison: {error}"));
    // Without a comparison, everything else is there.
    // A prediction has a step for every token, which steps with guesses are not.
    let plain = args.draft.source() == spanker_engine::DraftSource::None;
    let wanted = args.compare || (args.report.is_some() && plain);
    let compared = wanted.then(|| finished.compare().inspect_err(noted).ok()).flatten();
    let comparison =
        compared.as_ref().and_then(|compared| compared.comparison().inspect_err(noted).ok());
    if let Some(path) = &args.trace {
        let both = compared.as_ref().map(Compared::to_perfetto);
        files::write(path, both.unwrap_or_else(|| finished.to_perfetto()))?;
    }
    if let Some(path) = &args.report {
        page(path, &finished, compared.as_ref(), comparison.as_ref())?;
    }
    let comparison = comparison.filter(|_| args.compare);
    if args.json {
        if let Some(comparison) = &comparison {
            json["compare"] = finished.comparison_json(comparison);
        }
        return output::json(&json);
    }
    output::text("\n")?;
    if output::is_quiet() {
        return Ok(());
    }
    output::said_line("");
    let names = compared.as_ref().map(Compared::names).unwrap_or_default();
    let compared = comparison.iter().flat_map(|comparison| comparison.lines(names));
    lines.into_iter().chain(compared).for_each(output::said_line);
    if answer.finish == Some(FinishReason::Context) {
        log!("the context is full\nhint: give more room with --ctx-size");
    }
    if let Some(off) = doubt {
        let (percent, word) = (off.abs(), if off < 0.0 { "faster" } else { "slower" });
        output::note(format_args!(
            "this machine is {percent:.0} % {word} than when it was measured; the next run measures it again"
        ));
    }
    if let Some(path) = &args.trace {
        log!("saved {}: open it at https://ui.perfetto.dev", path.display());
    }
    if let Some(path) = &args.report {
        log!("saved {}: open it in a browser", path.display());
    }
    Ok(())
}

/// Writes the page about the plan that the run began with.
fn page(
    path: &Path,
    finished: &Finished,
    compared: Option<&Compared>,
    comparison: Option<&Comparison>,
) -> anyhow::Result<()> {
    let Some(first) = finished.pieces().first() else { return Ok(()) };
    let traces = compared.and_then(|compared| compared.traces().first());
    let report = Report {
        predicted: traces.map(|(predicted, _)| predicted),
        measured: traces.map(|(_, measured)| measured),
        comparison,
        ..Report::of(&first.plan)
    };
    report::write(path, &report, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_with_wrong_text_ends_with_an_error_that_names_the_token() {
        let blamed = "card 2 gives wrong answers".to_owned();
        let correction = Correction { token: 32, text: 100, blamed };
        let error = Audience::Stream.correct(&correction).expect_err("wrong");
        let text = error.to_string();
        assert!(text.starts_with("token 33 and what follows it in the output is wrong"), "{text}");
        assert!(text.contains("card 2") && text.contains("hint: --audit 1"), "{text}");
        for audience in [Audience::Later, Audience::Terminal] {
            assert!(audience.correct(&correction).is_ok());
        }
    }
}
