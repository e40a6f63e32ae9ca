// SPDX-License-Identifier: Apache-2.0
//! `spanker chat`: a conversation with a model that is split over cards.

mod input;

use std::path::Path;

use spanker_engine::{Conversation, Engine, EngineError, Limits, Sampling, Stop, files};

use crate::llm::{AuditArgs, DraftArgs, Place, PlaceArgs, SampleArgs};
use crate::run::Audience;
use crate::{output, refuse};
use input::{Input, Interrupts, Lines};

/// Tokens of a turn that a plan is priced for.
const TURN: usize = 64;

/// Talk with a model that is split over cards
///
/// One line is one turn; the end of input (Ctrl-D) or /quit ends the conversation, Ctrl-C ends an answer. The model's
/// own chat template is used, and special tokens that are typed stay text. When the context is full, the oldest turns
/// are forgotten. /help lists what else can be said: /reset, /save FILE, /load FILE, /stats.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker chat -m smollm2-135m --cards 3
  echo 'What is a sail?' | spanker chat -m smollm2-135m --temp 0
  spanker chat -m smollm2-135m --fabric cuda
  mpirun -n 3 spanker chat -m smollm2-135m")]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) on: PlaceArgs,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Tokens of an answer at most
    #[arg(short, long, default_value_t = 512, value_name = "TOKENS")]
    n_predict: usize,
    #[command(flatten)]
    sampling: SampleArgs,
    #[command(flatten)]
    audit: AuditArgs,
    #[command(flatten)]
    draft: DraftArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.n_predict == 0 {
        return refuse("--n-predict 0: at least one token is generated");
    }
    args.on.lead(None, |place| lead(args, place))
}

fn lead(args: &Args, place: &Place) -> anyhow::Result<()> {
    let Place { host, model, context, .. } = place;
    let stop = Stop::default();
    // Before any thread is started, which would take signals itself.
    let interrupts = Interrupts::watch(&stop)?;
    let request = place.request(TURN.min(*context), 128);
    let engine = place.load((&args.audit, &args.draft), request, false, |request| {
        Ok(host.plan(model, request, &args.on.wish())?)
    })?;
    let timeout = host.rank_place().map(|place| place.timeout / 4);
    let mut chat = Chat::new(args, place, engine, stop)?;
    let lines = Lines::read();
    // Whoever pipes lines in and sees no messages learns of turns that failed by the exit code.
    let mut failed = 0;
    loop {
        if lines.watched {
            output::prompt("> ");
        }
        interrupts.idle();
        let line = lines.next(timeout, &mut || Ok(chat.engine.heartbeat()?))?;
        let Some(line) = line.filter(|_| !output::is_unread()) else { break };
        interrupts.busy(&chat.limits.stop);
        let said = line.and_then(|line| match Input::of(&line) {
            Input::Nothing => Ok(Going::On),
            Input::Command(name, rest) => chat.command(name, rest),
            Input::Text(text) => chat.turn(text).map(|()| Going::On),
        });
        match said {
            Ok(Going::On) => {}
            Ok(Going::Home) => break,
            // A turn that cannot be answered is no reason to end the conversation.
            Err(error) if chat.engine.is_loaded() && is_survivable(&error) => {
                failed += usize::from(!lines.watched);
                log!("{error:#}");
                output::hint(&error);
            }
            Err(error) => return Err(error),
        }
    }
    match failed {
        0 => Ok(()),
        failed => anyhow::bail!("{} could not be answered", output::count(failed, "line")),
    }
}

/// Whether the conversation can go on after an error: everything but cards that are gone and output that nobody reads.
fn is_survivable(error: &anyhow::Error) -> bool {
    let gone =
        matches!(error.downcast_ref(), Some(EngineError::Run(_) | EngineError::Unavailable { .. }));
    !gone && !output::is_closed_pipe(error)
}

/// What follows a command.
enum Going {
    On,
    Home,
}

/// What can be said besides text.
const HELP: &str = "/reset        forget the conversation
/save FILE    write the conversation to a file, as JSON
/load FILE    go on with a conversation from a file
/stats        how fast the last answer was, beside its prediction
/quit         end the conversation (so does Ctrl-D); Ctrl-C ends an answer";

/// More than any conversation has.
const MOST_SAVED: u64 = 64 << 20;

/// A conversation.
struct Chat<'p> {
    args: &'p Args,
    place: &'p Place,
    engine: Engine<'p>,
    sampling: Sampling,
    conversation: Conversation,
    limits: Limits,
    stats: Vec<String>,
}

impl<'p> Chat<'p> {
    fn new(
        args: &'p Args,
        place: &'p Place,
        engine: Engine<'p>,
        stop: Stop,
    ) -> anyhow::Result<Chat<'p>> {
        // A model that cannot talk says so at once.
        place.model.chat_template()?;
        Ok(Chat {
            args,
            place,
            engine,
            sampling: args.sampling.sampling()?,
            conversation: Conversation::new(args.system.clone()),
            limits: Limits {
                tokens: Some(args.n_predict),
                stops: args.sampling.stops.clone(),
                stop,
                ..Limits::default()
            },
            stats: Vec::new(),
        })
    }

    /// One turn of the user, and the answer. After a turn that cannot be answered the conversation is as it was.
    fn turn(&mut self, text: &str) -> anyhow::Result<()> {
        let before = self.conversation.clone();
        self.conversation.ask(text);
        let answer = self.answer();
        match &answer {
            // Stopped before the first word: as if it had not been asked.
            Ok(answer) if !(answer.is_empty() && self.limits.stop.is_stopped()) => {
                self.conversation.answer(answer.clone());
            }
            _ => self.conversation = before,
        }
        answer.and_then(|_| output::line(""))
    }

    fn answer(&mut self) -> anyhow::Result<String> {
        let Place { model, context, .. } = self.place;
        let tokens = self.conversation.fit(model, *context, self.args.n_predict)?;
        // What is on the cards already stays there.
        let known = self.engine.tokens().iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let kept = known.min(tokens.len() - 1);
        self.engine.cut(kept);
        let wrong = |engine: &Engine<'_>| engine.audit().map_or(0, |log| log.found().len());
        let before = wrong(&self.engine);
        let (sampling, limits) = (self.sampling.clone(), self.limits.clone());
        let stop = limits.stop.clone();
        let generation = self.engine.generate(&tokens[kept..], sampling, limits)?;
        let (answer, sampling) = Audience::of(false).stream(generation, &stop)?;
        self.sampling = sampling;
        self.stats = self.engine.summary(&answer)?.lines();
        if wrong(&self.engine) > before && self.conversation.turns().len() > 1 {
            log!("answers before this one came from the same cards and may be wrong");
        }
        Ok(answer.text)
    }

    fn command(&mut self, name: &str, rest: &str) -> anyhow::Result<Going> {
        let file = || match rest {
            "" => Err(anyhow::anyhow!("/{name} needs the name of a file")),
            path => Ok(Path::new(path)),
        };
        match name {
            "quit" | "exit" => return Ok(Going::Home),
            "help" => output::said_line(HELP),
            "reset" => self.conversation.clear(),
            "stats" if self.stats.is_empty() => output::said_line("nothing was answered yet"),
            "stats" => self.stats.iter().for_each(output::said_line),
            "save" => {
                files::write(file()?, self.conversation.to_json())?;
                let turns = self.conversation.turns().len();
                log!("saved {rest}: {turns} turns");
            }
            "load" => {
                self.conversation.load_json(&files::read(file()?, MOST_SAVED)?)?;
                let turns = self.conversation.turns().len();
                log!("loaded {rest}: {turns} turns");
            }
            _ => anyhow::bail!("/{name}: no such command\n{HELP}"),
        }
        Ok(Going::On)
    }
}
