// SPDX-License-Identifier: Apache-2.0
//! `spanker serve`: a model that is split over cards, for many people at once, over HTTP.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_engine::{EngineError, Model, Service, ServiceOptions, files, models};
use spanker_serve::{Backend, HttpLimits, ServeError, ServeOptions, Server, TlsFiles};
use spanker_twin::Signals;

use crate::llm::{AuditArgs, DraftArgs, PlaceArgs};
use crate::{output, ranks, refuse, usage};

/// More than any file of keys has.
const MOST_KEYS: u64 = 1 << 20;

/// Serve a model that is split over cards to many people at once
///
/// Answers the requests that OpenAI's clients send (/v1/chat/completions, /v1/completions), with a page for people at /
/// and metrics for Prometheus at /metrics; /openapi.json describes all of it. It listens before the model is loaded, and
/// says 503 until it is. An interrupt or a plain kill lets answers that are under way finish and takes no new ones; a
/// second one ends at once.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker serve -m smollm2-135m
  spanker serve -m smollm2-135m --cards 3 --parallel 8 --port 9000
  spanker twin up --cards 4 --profile rev-a && spanker serve -m smollm2-135m --fabric cards
  spanker serve -m model.gguf --api-key secret --cors https://app.example --alias small
  spanker serve -m model.gguf --fabric cuda --ctx-size 8192 --kv-memory 16G

Other machines reach it with --host 0.0.0.0, which takes a key (--api-key-file), and should take TLS (--tls-cert,
--tls-key). A client, once it runs:
  curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'")]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// What the model is called [default: the name of its file]
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,
    #[command(flatten)]
    http: HttpArgs,
}

/// Which model is served, on what, and to how many.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub(crate) struct ModelArgs {
    #[command(flatten)]
    pub(crate) on: PlaceArgs,
    #[command(flatten)]
    audit: AuditArgs,
    #[command(flatten)]
    draft: DraftArgs,
    /// Requests that are answered at the same time; the split is the best for so many, so that fewer have answers sooner
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub(crate) parallel: usize,
    /// Requests that wait for their turn; more are told to come back later
    #[arg(long, default_value_t = 64, value_name = "N")]
    max_queue: usize,
    /// Memory for keys and values of all cards together, as in 512M or 16G [default: what the requests could need]
    #[arg(long, value_name = "BYTES", value_parser = spanker_bench::bytes)]
    kv_memory: Option<usize>,
    /// Compute every prompt anew, also where others began with the same
    #[arg(long)]
    no_prefix_cache: bool,
}

/// Where it listens, and to whom.
#[derive(Debug, clap::Args)]
struct HttpArgs {
    /// The address to listen at; others than this machine's own need an API key
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: String,
    /// The port; 0 takes one that is free, and says which
    #[arg(long, default_value_t = 8080, value_name = "PORT")]
    port: u16,
    /// A key that requests must have; may be given several times. Whoever lists processes sees it
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// Keys from a file, one in a line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// An origin whose pages may read answers, as in `https://app.example`, or * for all; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    cors: Vec<String>,
    /// The certificate for TLS, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its private key, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// How long answers that are under way may take once it is told to end
    #[arg(long, default_value = "30s", value_name = "TIME", value_parser = crate::times::drain)]
    timeout: Duration,
}

impl Args {
    /// How the server listens; `path` is the model's file.
    fn options(&self, path: &Path) -> anyhow::Result<ServeOptions> {
        let HttpArgs { host, port, cors, tls_cert, tls_key, timeout, .. } = &self.http;
        let part =
            |part: Option<&std::ffi::OsStr>| part.map(|name| name.to_string_lossy().into_owned());
        let (stem, file) = (part(path.file_stem()), part(path.file_name()));
        // Where it was fetched by a name, that is what people know.
        let asked = &self.model.on.llm.model;
        let usual = models::known(asked).map(|known| known.name.to_owned());
        let names = [self.alias.clone(), usual, stem, file, Some(asked.clone())];
        let mut names: Vec<String> = names.into_iter().flatten().collect();
        let name = names.remove(0);
        let tls = tls_cert.clone().zip(tls_key.clone());
        Ok(ServeOptions {
            host: host.clone(),
            port: *port,
            keys: self.keys()?,
            origins: cors.clone(),
            tls: tls.map(|(certificate, key)| TlsFiles { certificate, key }),
            name,
            other_names: names,
            drain: *timeout,
            limits: HttpLimits::usual(),
        })
    }

    fn keys(&self) -> anyhow::Result<Vec<String>> {
        let mut keys = self.http.api_key.clone();
        if let Some(path) = &self.http.api_key_file {
            let text = files::read(path, MOST_KEYS)?;
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            let before = keys.len();
            keys.extend(lines.map(str::to_owned));
            if keys.len() == before {
                return refuse(format!("--api-key-file {}: no key is in it", path.display()));
            }
        }
        Ok(keys)
    }
}

impl ModelArgs {
    /// Refuses flags that make no sense.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        self.draft.of_text()?;
        match self.parallel {
            0 => refuse("--parallel 0: at least one request is answered at a time"),
            _ => Ok(()),
        }
    }

    /// Whether another process of those that a launcher has started serves, and this one does what that one says.
    pub(crate) fn follows(&self) -> bool {
        self.on.takes_ranks() && !ranks::is_first()
    }

    /// Does what the first rank says, until it ends.
    pub(crate) fn follow(&self) -> anyhow::Result<()> {
        self.on.lead(None, |_| Ok(()))
    }

    /// How the model runs, for a context and a batch that it has.
    fn service(&self, context: usize, batch: usize) -> ServiceOptions {
        ServiceOptions {
            parallel: self.parallel,
            context,
            batch,
            kv_memory: self.kv_memory.map(|bytes| bytes as u64),
            kv: self.on.llm.kv,
            queue: self.max_queue,
            wish: self.on.wish(),
            audit: self.audit.audit,
            reuse: !self.no_prefix_cache,
            draft: self.draft.source(),
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    args.model.check()?;
    if args.model.follows() {
        return args.model.follow();
    }
    let path = models::find(&args.model.on.llm.model)?;
    let server = Server::bind(args.options(&path)?).map_err(explained)?;
    // Before any thread is started, which would take signals itself.
    let signals = Signals::take()?;
    let (url, handle) = (server.url(), server.handle());
    log!("listening on {}; the page is {url}", server.address());
    let drain = args.http.timeout;
    let mut is_ending = false;
    // Ends the server when somebody asks for it, and the program when they insist.
    signals.watch(move |caught| {
        if is_ending {
            std::process::exit(if caught.kill { 143 } else { 130 });
        }
        is_ending = true;
        log!("ending: answers that are under way have {drain:?}; once more ends at once");
        handle.end();
    });
    let loader = Loader { args: args.model.clone(), path };
    server.run(move || loader.load().map(|service| service as Arc<dyn Backend>))
}

/// What stands behind an error of the server, with advice where there is some.
fn explained(error: ServeError) -> anyhow::Error {
    match error {
        ServeError::Open { .. } => usage(format!(
            "{error}\nhint: --api-key-file FILE, or --host 127.0.0.1 for this machine alone"
        )),
        ServeError::Option { what } => usage(what),
        other => other.into(),
    }
}

/// What it takes to load the model on another thread.
pub(crate) struct Loader {
    pub(crate) args: ModelArgs,
    pub(crate) path: PathBuf,
}

impl Loader {
    /// Loads the model, says how it is laid out and what is expected of it.
    pub(crate) fn load(self) -> anyhow::Result<Arc<Service>> {
        let begun = Instant::now();
        let Loader { args, path } = self;
        let model = Arc::new(Model::open(path)?);
        let (context, batch) = args.on.llm.sizes(&model)?;
        let options = args.service(context, batch);
        let open = move || {
            let requested = |error: anyhow::Error| {
                error.downcast().unwrap_or_else(|other| EngineError::request(other.to_string()))
            };
            args.on.host().map_err(requested)
        };
        let service = Service::start(model, options, open)?;
        let status = service.status();
        output::progress_done();
        if !output::is_quiet() {
            let seconds = begun.elapsed().as_secs_f64();
            let layout = if status.layout.is_empty() { "loaded" } else { &status.layout };
            log!("{layout} after {seconds:.1} s");
            for (clients, rate) in &status.expected {
                log!(
                    "{}: {rate:.1} tokens/s in all, by the prediction",
                    output::count(*clients, "client")
                );
            }
        }
        Ok(Arc::new(service))
    }
}
