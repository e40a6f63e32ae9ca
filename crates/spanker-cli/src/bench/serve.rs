// SPDX-License-Identifier: Apache-2.0
//! `spanker bench serve`: what so many clients of a server see, beside what is foretold.

use spanker_bench::{OwnServer, ServeBench, ServeRow, Times, local_address};
use spanker_engine::{Arrivals, Model, ServiceLoad, models};

use super::count;
use crate::output::{self, Cell, figure, percent};
use crate::refuse;
use crate::serve::{Loader, ModelArgs};

/// More requests than this in a row are refused.
const MOST_REQUESTS: usize = 1_000_000;
/// Measure what clients of a server see: tokens/s, the time to the first token and between tokens
///
/// It starts 'spanker serve' on a free port of this machine and asks it for answers over HTTP, as clients do. Each
/// client asks again when it has its answer; with --rate, requests come by the clock instead, at random times that
/// follow from the seed. "predicted" is what the same schedule of steps takes in virtual time, by what threads of this
/// machine take before and after the row, and "error" how much slower it was; on emulated cards by the cards' clocks
/// ("card time"), as they take longer than the time that they show. With --url it loads a server that runs already, ours
/// or another that speaks OpenAI's API; then nothing is foretold. Before the rows come requests that are not counted.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker bench serve -m smollm2-135m
  spanker bench serve -m smollm2-135m --clients 8 --n-prompt 600 --shared 500 --n-gen 32
  spanker bench serve -m smollm2-135m --clients 8 --rate 2.5
  spanker twin up --cards 4 --profile rev-a && spanker bench serve -m smollm2-135m --fabric cards
  spanker bench serve -m model.gguf --url http://127.0.0.1:8081")]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// Clients at the same time, one row for each number
    #[arg(long, default_value = "1,4,16", value_name = "LIST", value_delimiter = ',', value_parser = count(1024))]
    clients: Vec<u64>,
    /// Requests of each client
    #[arg(short, long, default_value_t = 4, value_name = "N", value_parser = count(100_000))]
    requests: u64,
    /// Tokens of a prompt
    #[arg(short = 'p', long = "n-prompt", default_value_t = 40, value_name = "TOKENS", value_parser = count(1 << 20))]
    prompt: u64,
    /// Tokens with which all prompts begin
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    shared: u64,
    /// Tokens of an answer
    #[arg(short = 'n', long = "n-gen", default_value_t = 48, value_name = "TOKENS", value_parser = count(1 << 20))]
    answer: u64,
    /// Requests in a second of all clients together, whether or not others have been answered
    #[arg(long, value_name = "N")]
    rate: Option<f64>,
    /// What prompts and times follow from
    #[arg(short, long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// A server on this machine that runs already, as in http://127.0.0.1:8080; -m says which model it has
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The key that it asks for
    #[arg(long, value_name = "KEY", requires = "url")]
    api_key: Option<String>,
    /// Print one JSON object per row instead of a table
    #[arg(long)]
    json: bool,
}

impl Args {
    fn load(&self, clients: u64) -> ServiceLoad {
        let arrivals = match self.rate {
            Some(rate) => Arrivals::Open { rate, seed: self.seed },
            None => Arrivals::Closed,
        };
        ServiceLoad {
            clients: clients as usize,
            prompt: self.prompt as usize,
            shared: self.shared as usize,
            answer: self.answer as usize,
            requests: self.requests as usize,
            arrivals,
        }
    }

    fn check(&self) -> anyhow::Result<()> {
        self.model.check()?;
        let (prompt, shared) = (self.prompt, self.shared);
        if shared > prompt {
            return refuse(format!("--shared {shared}: a prompt has {prompt} tokens"));
        }
        if let Some(rate) = self.rate.filter(|rate| !(rate.is_finite() && *rate > 0.0)) {
            return refuse(format!("--rate {rate}: more than 0 requests in a second"));
        }
        let most = self.clients.iter().max().copied().unwrap_or(0) as usize;
        match most.saturating_mul(self.requests as usize) {
            count if count > MOST_REQUESTS => {
                refuse(format!("{count} requests in a row: up to {MOST_REQUESTS}"))
            }
            _ => Ok(()),
        }
    }
}

/// The server that flags name.
fn open(args: &Args) -> anyhow::Result<ServeBench> {
    let other = args.url.as_deref().map(local_address).transpose()?;
    let path = models::find(&args.model.on.llm.model)?;
    if let Some(address) = other {
        let vocab = Model::open(path)?.shape().vocab;
        return Ok(ServeBench::of_other(address, args.api_key.clone(), vocab, args.seed));
    }
    let loader = Loader { args: args.model.clone(), path };
    let own = OwnServer::start(move || loader.load())?;
    let many_hosts = args.model.on.llm.takes().many_hosts;
    let host = many_hosts.then(|| args.model.on.host()).transpose()?;
    Ok(ServeBench::of_own(own, host, args.seed)?)
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    args.check()?;
    if args.model.follows() {
        return args.model.follow();
    }
    let mut bench = open(args)?;
    let context = bench.context().map(|context| context as u64);
    if let Some(context) = context.filter(|&context| args.prompt + args.answer > context) {
        let (prompt, answer) = (args.prompt, args.answer);
        return refuse(format!(
            "--n-prompt {prompt} and --n-gen {answer}: --ctx-size is {context} tokens"
        ));
    }
    bench.warm(args.load(2))?;
    let (mut table, mut lost) = (output::Rows::new(args.json), 0);
    for &clients in &args.clients {
        let all = clients * args.requests;
        let tell = move |done: usize| {
            output::progress_of(done as u64, all, &format!("{clients} clients"));
        };
        let row =
            bench.row(args.load(clients), || output::progress("measuring this machine .."), tell);
        output::progress_done();
        let row = row?;
        lost += row.failed.len();
        if let Some(first) = row.failed.first() {
            output::note(format_args!("{} requests failed, one with: {first}", row.failed.len()));
        }
        table.add(&row, cells)?;
    }
    match lost {
        0 => Ok(()),
        lost => Err(anyhow::anyhow!("{lost} requests failed")),
    }
}

fn cells(row: &ServeRow) -> Vec<Cell> {
    let pair = |times: Option<Times>| match times {
        Some(Times { p50_ms, p99_ms }) => format!("{p50_ms:.1} / {p99_ms:.1}"),
        None => "-".into(),
    };
    let share = |part: Option<f64>| figure(part.map(|part| 100.0 * part), 0, " %");
    let predicted = row.predicted;
    vec![
        Cell::of("clients", "", 7, row.clients),
        Cell::of("tokens/s", "", 8, format!("{:.1}", row.tokens_per_second)),
        Cell::of("card time", "", 9, figure(row.card_tokens_per_second, 1, "")),
        Cell::of("predicted", "", 9, figure(predicted.map(|of| of.tokens_per_second), 1, "")),
        Cell::of("error", "", 8, percent(row.error_percent)),
        Cell::of("first p50/p99", "(ms)", 15, pair(Some(row.first))),
        Cell::of("predicted", "(ms)", 15, pair(predicted.map(|of| of.first))),
        Cell::of("between p50/p99", "(ms)", 15, pair(Some(row.between))),
        Cell::of("predicted", "(ms)", 15, pair(predicted.map(|of| of.between))),
        Cell::of("cached", "", 6, share(row.cached)),
        Cell::of("foretold", "", 8, share(predicted.map(|of| of.cached))),
        Cell::of("refused", "", 7, row.refused),
    ]
}
