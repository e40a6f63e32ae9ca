// SPDX-License-Identifier: Apache-2.0
//! `spanker chat`: a conversation with a model that is split over cards.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::Context as _;
use spanker_llm::{Runner, Session};
use spanker_text::template::{self, Context, Message};

use crate::directory::CardList;
use crate::llm::cards::{Cards, Ongoing};
use crate::llm::generate::{GiveUp, Limits, Mend, generate};
use crate::llm::{self, FabricKind, Loaded, SampleArgs, Split, host, layout};
use crate::run::in_process;
use crate::{Usage, output};

/// Talk with a model that is split over cards
///
/// One line is one turn; an empty line or the end of input ends the conversation. The model's own chat
/// template is used. When the context is full, the oldest turns are forgotten.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker chat -m smollm2-135m --cards 3
  echo 'What is a sail?' | spanker chat -m smollm2-135m --temp 0")]
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
    /// How to split the model [default: the planner's best that gives the bits of one card]
    #[arg(long, value_enum)]
    split: Option<Split>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.n_predict == 0 {
        return Err(Usage("--n-predict 0: at least one token is generated".into()).into());
    }
    let loaded = Loaded::open(&args.llm)?;
    let shares = args.llm.tensor_split.as_deref();
    let request = layout::request(loaded.context, 64.min(loaded.context), 128);
    let cards = match args.llm.fabric {
        FabricKind::Inproc | FabricKind::Cuda => None,
        FabricKind::Cards => Some(Cards::open(args.cards.as_ref(), args.llm.deadline)?),
    };
    let Some(cards) = cards else {
        let count = llm::thread_cards(args.cards.as_ref(), shares)?;
        let split = args.split.unwrap_or(Split::Gather);
        let plan =
            |cluster| layout::plan(loaded.network.model(), cluster, request, Some(split), shares);
        let runner: Box<dyn Runner> = if args.llm.fabric == FabricKind::Cuda {
            let gpus = llm::gpu::Gpus::open()?;
            gpus.runner(&loaded, &plan(gpus.cluster(&loaded, count)?)?)?
        } else {
            let cluster = host::cluster(&loaded.network, count, loaded.threads, 64)?;
            Box::new(in_process(&loaded, &plan(cluster)?)?)
        };
        let mut session = Session::new(runner);
        return converse(args, &loaded, &mut session, &mut GiveUp);
    };
    let plan = cards.plan(&loaded, request, args.split, shares)?;
    let runner = cards.load(&loaded, &plan).map_err(|error| cards.told(error))?;
    let left = cards.indices.clone();
    let mut ongoing = Ongoing { cards: &cards, plan, left, lost: 0, recorder: None };
    converse(args, &loaded, &mut Session::new(Box::new(runner)), &mut ongoing)
}

/// Turn after turn.
fn converse<'r>(
    args: &Args,
    loaded: &Loaded,
    session: &mut Session<'r>,
    mend: &mut dyn Mend<'r>,
) -> anyhow::Result<()> {
    let mut sampler = args.sampling.sampler()?;
    let source = template::of(loaded.network.header(), loaded.network.bytes())?;
    let system = args.system.as_ref().map(|text| Message::new("system", text.clone()));
    let mut turns: Vec<Message> = Vec::new();
    let (input, watched) = (std::io::stdin(), std::io::stdin().is_terminal());
    let limits = Limits { tokens: args.n_predict, ignore_end: false, keep_logits: false };
    loop {
        if watched {
            eprint!("> ");
        }
        let mut line = String::new();
        let read = input.lock().read_line(&mut line).context("cannot read standard input")?;
        if read == 0 || line.trim().is_empty() {
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
        let answer =
            generate(loaded, session, &tokens[kept..], &mut sampler, limits, mend, &mut show)?;
        output::line("")?;
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
