// SPDX-License-Identifier: Apache-2.0
//! `spanker chat`: a conversation with a model that is split over cards.

use std::io::{BufRead, IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};

use anyhow::Context as _;
use spanker_llm::{AuditLog, Front, Session};
use spanker_text::template::{self, Context, Message};

use crate::directory::CardList;
use crate::llm::cards::{Cards, Ongoing};
use crate::llm::generate::{GiveUp, Limits, Mend, generate};
use crate::llm::given::Audience;
use crate::llm::ranks::{self, Place};
use crate::llm::{self, AuditArgs, FabricKind, Loaded, SampleArgs, Split, host, layout};
use crate::run::in_process;
use crate::{Usage, output};

/// Tokens of a turn that a plan is priced for.
const TURN: usize = 64;

/// Talk with a model that is split over cards
///
/// One line is one turn; an empty line or the end of input ends the conversation. The model's own chat
/// template is used. When the context is full, the oldest turns are forgotten.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker chat -m smollm2-135m --cards 3
  echo 'What is a sail?' | spanker chat -m smollm2-135m --temp 0
  spanker chat -m smollm2-135m --fabric cuda
  mpirun -n 3 spanker chat -m smollm2-135m")]
pub(crate) struct Args {
    #[command(flatten)]
    llm: llm::Args,
    /// Cards: a number, or for --fabric cards a list as in 0,1,3 [default: 1 in-process, all cards]
    #[arg(long, value_name = "CARDS")]
    cards: Option<CardList>,
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
    /// How to split the model [default: the planner's best that gives the bits of one card]
    #[arg(long, value_enum)]
    split: Option<Split>,
}

impl Args {
    /// Whether this is work for all processes that a launcher has started.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.llm.fabric() == FabricKind::Mpi
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match args.llm.fabric() {
        FabricKind::Inproc => in_threads(args),
        FabricKind::Cards => on_cards(args),
        FabricKind::Cuda => on_gpus(args),
        FabricKind::Mpi => ranks::join(&args.llm, &|_| Ok(None), |loaded, front, place| {
            on_ranks(args, loaded, front, place)
        }),
    }
}

/// What is asked of a conversation.
fn request(args: &Args, loaded: &Loaded) -> anyhow::Result<spanker_plan::Request> {
    if args.n_predict == 0 {
        return Err(Usage("--n-predict 0: at least one token is generated".into()).into());
    }
    let audit = args.audit.fraction(args.llm.fabric())?;
    let request = layout::request(loaded.context, loaded.batch, TURN.min(loaded.context), 128);
    Ok(spanker_plan::Request { audit, ..request })
}

fn in_threads(args: &Args) -> anyhow::Result<()> {
    let loaded = Loaded::open(&args.llm)?;
    let (request, shares) = (request(args, &loaded)?, args.llm.tensor_split.as_deref());
    let count = llm::thread_cards(args.cards.as_ref(), shares)?;
    let (model, split) = (loaded.network.model(), args.split.unwrap_or(Split::Gather));
    let layout = layout::given(model, split, &layout::shares(shares, count)?)?;
    let plan = host::unpriced(&loaded, layout, request)?;
    let mut session = Session::new(Box::new(in_process(&loaded, &plan)?));
    converse(args, &loaded, &mut session, &mut GiveUp, &mut |_| read_line())
}

fn on_gpus(args: &Args) -> anyhow::Result<()> {
    let loaded = Loaded::open(&args.llm)?;
    let (request, shares) = (request(args, &loaded)?, args.llm.tensor_split.as_deref());
    let count = llm::thread_cards(args.cards.as_ref(), shares)?;
    let gpus = llm::gpu::Gpus::open(count)?;
    let cluster = gpus.cluster(&loaded, count)?;
    let split = args.split.unwrap_or(Split::Gather);
    let plan = layout::plan(loaded.network.model(), cluster, request, Some(split), shares)?;
    let (runner, mut mend) = args.audit.twice(&loaded, &plan, gpus.runner(&loaded, &plan)?.0)?;
    converse(args, &loaded, &mut Session::new(runner), &mut mend, &mut |_| read_line())
}

fn on_cards(args: &Args) -> anyhow::Result<()> {
    let loaded = Loaded::open(&args.llm)?;
    let (request, shares) = (request(args, &loaded)?, args.llm.tensor_split.as_deref());
    let cards = Cards::open(args.cards.as_ref(), args.llm.deadline)?;
    let plan = cards.plan(&loaded, request, args.split, shares)?;
    let (left, log) = (cards.indices.clone(), AuditLog::new(plan.request.audit));
    let runner = cards.runner(&left, &loaded, &plan, None, &log);
    let (runner, memory) = runner.map_err(|error| cards.told(error))?;
    let mut session = Session::new(runner);
    let pieces = Vec::new();
    let mut ongoing = Ongoing { cards: &cards, plan, left, lost: 0, pieces, log, memory };
    converse(args, &loaded, &mut session, &mut ongoing, &mut |_| read_line())
}

/// The front of a conversation whose cards are processes.
fn on_ranks(
    args: &Args,
    loaded: &Loaded,
    front: &mut Front<'_>,
    place: &Place,
) -> anyhow::Result<()> {
    let (request, shares) = (request(args, loaded)?, args.llm.tensor_split.as_deref());
    let count = ranks::cards(args.cards.as_ref(), shares, place)?;
    let (model, split) = (loaded.network.model(), args.split.unwrap_or(Split::Gather));
    let layout = layout::given(model, split, &layout::shares(shares, count)?)?;
    let plan = host::unpriced(loaded, layout, request)?;
    let (context, batch) = (loaded.context, loaded.batch);
    let runner = front.lay_out(&loaded.network, &plan, context, batch, loaded.threads)?;
    let (runner, mut mend) = args.audit.twice(loaded, &plan, Box::new(runner))?;
    let mut session = Session::new(runner);
    // Ranks lose patience; whoever types need not hurry.
    let (sender, lines) = sync_channel(1);
    std::thread::spawn(move || {
        loop {
            let line = read_line();
            let last = !matches!(line, Ok(Some(_)));
            if sender.send(line).is_err() || last {
                return;
            }
        }
    });
    let mut next = |session: &mut Session<'_>| loop {
        match lines.recv_timeout(place.patience / 4) {
            Ok(line) => return line,
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => session.beat()?,
        }
    };
    converse(args, loaded, &mut session, &mut mend, &mut next)
}

/// The next line, or nothing at the end of input.
fn read_line() -> anyhow::Result<Option<String>> {
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line);
    Ok((read.context("cannot read standard input")? > 0).then_some(line))
}

/// Turn after turn.
fn converse<'r>(
    args: &Args,
    loaded: &Loaded,
    session: &mut Session<'r>,
    mend: &mut dyn Mend<'r>,
    next: &mut dyn FnMut(&mut Session<'r>) -> anyhow::Result<Option<String>>,
) -> anyhow::Result<()> {
    let mut sampler = args.sampling.sampler()?;
    let source = template::of(loaded.network.header(), loaded.network.bytes())?;
    let system = args.system.as_ref().map(|text| Message::new("system", text.clone()));
    let mut turns: Vec<Message> = Vec::new();
    let watched = std::io::stdin().is_terminal();
    let audience = Audience::of(false);
    let limits = Limits { tokens: args.n_predict, ignore_end: false, keep_logits: false, audience };
    loop {
        if watched {
            eprint!("> ");
        }
        let line = next(session)?.unwrap_or_default();
        if line.trim().is_empty() {
            return Ok(());
        }
        turns.push(Message::new("user", line.trim()));
        let tokens = fitting(args, loaded, &source, system.as_ref(), &mut turns)?;
        // What is on the cards already stays there.
        let same = session.tokens().iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let kept = same.min(tokens.len() - 1);
        session.cut(kept);
        let mut show = |text: &str| -> anyhow::Result<()> {
            let mut out = std::io::stdout().lock();
            out.write_all(text.as_bytes())?;
            Ok(out.flush()?)
        };
        let wrong = |mend: &dyn Mend<'r>| mend.audit().map_or(0, |log| log.found().len());
        let before = wrong(mend);
        let answer =
            generate(loaded, session, &tokens[kept..], &mut sampler, limits, mend, &mut show)?;
        output::line("")?;
        if wrong(mend) > before && turns.len() > 1 {
            eprintln!("answers before this one came from the same cards and may be wrong");
        }
        turns.push(Message::new("assistant", answer.text));
    }
}

/// The conversation as tokens, without its oldest turns if it would leave no room for an answer.
fn fitting(
    args: &Args,
    loaded: &Loaded,
    source: &str,
    system: Option<&Message>,
    turns: &mut Vec<Message>,
) -> anyhow::Result<Vec<u32>> {
    let tokenizer = &loaded.tokenizer;
    let piece = |token: Option<u32>| {
        let bytes = token.map(|token| tokenizer.piece(token)).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    };
    let (bos, eos) = (piece(tokenizer.bos()), piece(tokenizer.eos()));
    loop {
        let all: Vec<Message> = system.into_iter().chain(turns.iter()).cloned().collect();
        let context = Context { add_generation_prompt: true, bos: &bos, eos: &eos, date: "" };
        let text = template::render(source, &all, context)?;
        // A template that writes the first token itself must not get it twice.
        let begins = tokenizer.add_bos() && (bos.is_empty() || !text.starts_with(&bos));
        let tokens = tokenizer.encode(&text, begins, true);
        let room = args.n_predict.min(loaded.context / 4).max(1);
        if tokens.len() + room <= loaded.context {
            return Ok(tokens);
        }
        if turns.len() == 1 {
            let (count, context) = (tokens.len(), loaded.context);
            anyhow::bail!(
                "this turn has {count} tokens, too many for a context of {context}\nhint: give more room with --ctx-size"
            );
        }
        turns.drain(..2.min(turns.len() - 1));
    }
}
