// SPDX-License-Identifier: Apache-2.0
//! `spanker bench serve`: what so many clients of a server see, beside what is foretold.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use spanker_bench::{EdgeClock, LoadSeen, LoadTarget, OwnSteps, ServeRow, Times, load_server};
use spanker_engine::{
    Arrivals, Calibration, Forecast, Host, Model, Service, ServiceLoad, ServicePlan, Status, models,
};
use spanker_serve::{Backend, HttpLimits, ServeOptions, Server};

use super::refuse;
use crate::output::{self, Cell};
use crate::serve::{Loader, ModelArgs};

/// More requests than this in a row are refused.
const MOST_REQUESTS: usize = 1_000_000;
/// Clients of the requests that do not count, at most.
const WARM: u64 = 16;
/// How often a server that loads its model is asked whether it is ready.
const LOOK: Duration = Duration::from_millis(5);
/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Measure what clients of a server see: tokens/s, the time to the first token and between tokens
///
/// It starts 'spanker serve' on a free port of this machine and asks it for answers over HTTP, as clients do. Each
/// client asks again when it has its answer; with --rate, requests come by the clock instead, at random times that
/// follow from the seed. "predicted" is what the same schedule of steps takes in virtual time, by what threads of this
/// machine take before and after the row, and "error" how much slower it was; on emulated cards by the cards' clocks
/// ("card time"), as they take longer than the time that they show. With --url it loads a server that runs already, ours
/// or another that speaks OpenAI's API; then nothing is foretold. Before the rows come requests that are not counted:
/// they also say what handing out a token takes where server and clients share their cores with the threads of the cards.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker bench serve -m smollm2-135m
  spanker bench serve -m smollm2-135m --clients 8 --n-prompt 600 --shared 500 --n-gen 32
  spanker bench serve -m smollm2-135m --clients 8 --rate 2.5
  spanker twin up --cards 4 --profile rev-a && spanker bench serve -m smollm2-135m --fabric cards
  spanker bench serve -m model.gguf --url http://127.0.0.1:8081")]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
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

fn count(most: u64) -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=most)
}

impl Args {
    pub(super) fn takes_ranks(&self) -> bool {
        self.model.takes_ranks()
    }

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

/// The address in a URL of this machine.
fn address(url: &str) -> anyhow::Result<SocketAddr> {
    let Some(rest) = url.strip_prefix("http://") else {
        return refuse(format!("--url {url}: expected http://, an address and a port"));
    };
    let authority = rest.split('/').next().unwrap_or_default();
    let name =
        if authority.contains(':') { authority.to_owned() } else { format!("{authority}:80") };
    let found = name.to_socket_addrs().ok().and_then(|mut list| list.next());
    match found {
        Some(address) if address.ip().is_loopback() => Ok(address),
        Some(_) => refuse(format!("--url {url}: only servers on this machine are loaded")),
        None => refuse(format!("--url {url}: no such address")),
    }
}

/// A server of this process, until it is dropped.
struct Own {
    service: Arc<Service>,
    handle: spanker_serve::Handle,
    thread: Option<std::thread::JoinHandle<()>>,
    address: SocketAddr,
}

impl Own {
    fn start(args: &Args) -> anyhow::Result<Own> {
        let path = models::find(&args.model.llm.model)?;
        let server = Server::bind(ServeOptions {
            host: "127.0.0.1".into(),
            port: 0,
            keys: Vec::new(),
            origins: Vec::new(),
            tls: None,
            name: "model".into(),
            other_names: Vec::new(),
            drain: Duration::ZERO,
            limits: HttpLimits::usual(),
        })?;
        let (handle, address) = (server.handle(), server.address());
        let loader = Loader { args: args.model.clone(), path };
        let (loaded, ready) = mpsc::channel();
        let failed = loaded.clone();
        let load = move || {
            let service = loader.load()?;
            // Nobody waits for it if the command has ended.
            let _ = loaded.send(Ok(Arc::clone(&service)));
            anyhow::Ok(service as Arc<dyn Backend>)
        };
        let thread = std::thread::spawn(move || {
            if let Err(error) = server.run(load) {
                let _ = failed.send(Err(error));
            }
        });
        let ended = || anyhow::anyhow!("the server has ended");
        let service = ready.recv().map_err(|_| ended())??;
        // The server makes itself ready for the model's answers before it gives any.
        while !handle.is_ready() {
            match ready.recv_timeout(LOOK) {
                Ok(Err(error)) => return Err(error),
                Ok(Ok(_)) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
            }
        }
        Ok(Own { service, handle, thread: Some(thread), address })
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.handle.end();
        if let Some(thread) = self.thread.take() {
            // Its panic was reported where it happened.
            let _ = thread.join();
        }
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    args.check()?;
    if args.model.follows() {
        return args.model.follow();
    }
    let other = args.url.as_deref().map(address).transpose()?;
    let (own, vocab) = match other {
        Some(_) => {
            let model = Model::open(models::find(&args.model.llm.model)?)?;
            (None, model.shape().vocab)
        }
        None => {
            let own = Own::start(args)?;
            let vocab = own.service.model().shape().vocab;
            (Some(own), vocab)
        }
    };
    let address = other.or(own.as_ref().map(|own| own.address));
    let address = address.ok_or_else(|| anyhow::anyhow!("no server"))?;
    let room = own.as_ref().map(|own| own.service.options().context as u64);
    if let Some(room) = room.filter(|&room| args.prompt + args.answer > room) {
        let (prompt, answer) = (args.prompt, args.answer);
        return refuse(format!(
            "--n-prompt {prompt} and --n-gen {answer}: --ctx-size is {room} tokens"
        ));
    }
    let target = |seed: u64| LoadTarget {
        address,
        key: args.api_key.clone(),
        model: None,
        vocab,
        seed,
        timeout: TIMEOUT,
    };
    // Memory is touched and code is paged in.
    let most = args.clients.iter().copied().max().unwrap_or(1).min(WARM);
    let warm = ServiceLoad { requests: 1, arrivals: Arrivals::Closed, ..args.load(most) };
    let edge = EdgeClock::start();
    let warmed =
        load_server(&target(args.seed ^ 0x5741_524d), warm, |_| ()).map_err(super::failure)?;
    if let Some(first) = warmed.failed.first() {
        return Err(anyhow::anyhow!("a request before the first row failed: {first}"));
    }
    let edge = edge.map_or(0.0, |edge| edge.of_each(warmed.tokens));
    let mut beside = own.as_ref().map(|own| Beside::new(args, own, edge)).transpose()?.flatten();
    let (mut table, mut lost) = (output::Rows::default(), 0);
    for (row, &clients) in args.clients.iter().enumerate() {
        let load = args.load(clients);
        // Each row has prompts of its own.
        let target = target(args.seed.wrapping_add((row as u64) << 32));
        let row = measured(&target, load, own.as_ref(), beside.as_mut())?;
        lost += row.failed.len();
        if let Some(first) = row.failed.first() {
            output::note(format_args!("{} requests failed, one with: {first}", row.failed.len()));
        }
        match args.json {
            true => output::json(&row)?,
            false => table.add(&cells(&row))?,
        }
    }
    drop(own);
    match lost {
        0 => Ok(()),
        lost => Err(anyhow::anyhow!("{lost} requests failed")),
    }
}

/// What clients see of a server, beside what is foretold where it is this process.
fn measured(
    target: &LoadTarget,
    load: ServiceLoad,
    own: Option<&Own>,
    mut beside: Option<&mut Beside>,
) -> anyhow::Result<ServeRow> {
    let all = load.clients * load.requests;
    let tell = move |done: usize| {
        output::progress_of(done as u64, all as u64, &format!("{} clients", load.clients));
    };
    beside.as_mut().map_or(Ok(()), |beside| beside.begin())?;
    let before = own.map(|own| own.service.status());
    let seen: LoadSeen = load_server(target, load, tell).map_err(super::failure)?;
    output::progress_done();
    let after = own.map(|own| own.service.status());
    beside.as_mut().map_or(Ok(()), |beside| beside.measure())?;
    let forecast = foretold(own, beside.as_deref(), load)?;
    let steps = before.zip(after).map(|(before, after)| meanwhile(&before, &after));
    Ok(ServeRow::new(load, &seen, steps, forecast.as_ref()))
}

/// What steps take on threads of this machine, measured while the server has nothing to do: before and after each row, so
/// that the prediction and what it is compared with meet the same neighbours.
struct Beside {
    host: Host,
    model: Arc<Model>,
    planned: ServicePlan,
    calibration: Calibration,
    /// Seconds of handing out a token.
    edge: f64,
}

impl Beside {
    /// Nothing where clocks are steady, or cards can be open once only.
    fn new(args: &Args, own: &Own, edge: f64) -> anyhow::Result<Option<Beside>> {
        if !args.model.llm.fabric().takes().many_hosts {
            return Ok(None);
        }
        let (host, model) = (args.model.host()?, Arc::clone(own.service.model()));
        let planned = ServicePlan::on_host(&host, &model, own.service.options())?;
        let calibration = Calibration::new(&host, &model, &planned.plan)?;
        Ok(Some(Beside { host, model, planned, calibration, edge }))
    }

    /// Begins anew: what was measured before another row does not count.
    fn begin(&mut self) -> anyhow::Result<()> {
        self.calibration = Calibration::new(&self.host, &self.model, &self.planned.plan)?;
        self.measure()
    }

    fn measure(&mut self) -> anyhow::Result<()> {
        output::progress("measuring this machine ..");
        Ok(self.calibration.round(&self.host, &self.model, &self.planned.plan)?)
    }
}

/// What is foretold of a row, if it is known what the server does.
fn foretold(
    own: Option<&Own>,
    beside: Option<&Beside>,
    load: ServiceLoad,
) -> anyhow::Result<Option<Forecast>> {
    let Some(Beside { host, planned, calibration, edge, .. }) = beside else {
        return Ok(own.map(|own| own.service.forecast(load)));
    };
    let priced = planned.priced(calibration.priced(host, &planned.plan)?)?;
    Ok(Some(priced.delivering(*edge).forecast(load)))
}

/// What a service did between two looks.
fn meanwhile(before: &Status, after: &Status) -> OwnSteps {
    let copies = after.card_seconds.iter().enumerate();
    let took = copies.map(|(copy, now)| now - before.card_seconds.get(copy).unwrap_or(&0.0));
    // Copies of the model work side by side.
    let card_seconds = took.reduce(f64::max);
    OwnSteps { steps: after.steps - before.steps, card_seconds }
}

fn cells(row: &ServeRow) -> Vec<Cell> {
    let pair = |times: Option<Times>| match times {
        Some(Times { p50_ms, p99_ms }) => format!("{p50_ms:.1} / {p99_ms:.1}"),
        None => "-".into(),
    };
    let figure = |value: Option<f64>, digits: usize, unit: &str| match value {
        Some(value) => format!("{value:.digits$}{unit}"),
        None => "-".into(),
    };
    let percent = |part: Option<f64>| figure(part.map(|part| 100.0 * part), 0, " %");
    let predicted = row.predicted;
    vec![
        Cell::of("clients", "", 7, row.clients),
        Cell::of("tokens/s", "", 8, format!("{:.1}", row.tokens_per_second)),
        Cell::of("card time", "", 9, figure(row.card_tokens_per_second, 1, "")),
        Cell::of("predicted", "", 9, figure(predicted.map(|of| of.tokens_per_second), 1, "")),
        Cell::of(
            "error",
            "",
            8,
            row.error_percent.map_or_else(|| "-".into(), |error| format!("{error:+.1} %")),
        ),
        Cell::of("first p50/p99", "(ms)", 15, pair(Some(row.first))),
        Cell::of("predicted", "(ms)", 15, pair(predicted.map(|of| of.first))),
        Cell::of("between p50/p99", "(ms)", 15, pair(Some(row.between))),
        Cell::of("predicted", "(ms)", 15, pair(predicted.map(|of| of.between))),
        Cell::of("cached", "", 6, percent(row.cached)),
        Cell::of("foretold", "", 8, percent(predicted.map(|of| of.cached))),
        Cell::of("refused", "", 7, row.refused),
    ]
}
