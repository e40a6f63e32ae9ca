// SPDX-License-Identifier: Apache-2.0
//! A server under load, row by row: one of this process, whose rows stand beside what its schedule of steps takes in virtual
//! time, or another on this machine.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use spanker_engine::{
    Arrivals, Calibration, EngineError, Forecast, Host, Model, Service, ServiceLoad, ServicePlan,
    Status,
};
use spanker_serve::{Backend, Handle, HttpLimits, ServeError, ServeOptions, Server};

use super::{LoadTarget, OwnSteps, ServeRow, load_server};
use crate::error::{BenchError, Result};

/// How often a server that loads its model is asked whether it is ready.
const LOOK: Duration = Duration::from_millis(5);
/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(600);
/// What the prompts of the first requests, which are not counted, follow from.
const WARM: u64 = 0x5741_524d;

/// The address in a URL of this machine.
///
/// # Errors
/// [`EngineError::Request`] for another machine, or for no address.
pub fn local_address(url: &str) -> Result<SocketAddr, EngineError> {
    let refuse = |what: &str| Err(EngineError::request(format!("--url {url}: {what}")));
    let Some(rest) = url.strip_prefix("http://") else {
        return refuse("expected http://, an address and a port");
    };
    let authority = rest.split('/').next().unwrap_or_default();
    let name =
        if authority.contains(':') { authority.to_owned() } else { format!("{authority}:80") };
    match name.to_socket_addrs().ok().and_then(|mut list| list.next()) {
        Some(address) if address.ip().is_loopback() => Ok(address),
        Some(_) => refuse("only servers on this machine are loaded"),
        None => refuse("no such address"),
    }
}

/// A server of this process on a free port, until it is dropped.
pub struct OwnServer {
    service: Arc<Service>,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
    address: SocketAddr,
}

impl OwnServer {
    /// Starts it with the service that `load` gives, and waits until it is ready.
    ///
    /// # Errors
    /// What `load` fails with, and [`ServeError`].
    pub fn start<E: From<ServeError> + Send + 'static>(
        load: impl FnOnce() -> Result<Arc<Service>, E> + Send + 'static,
    ) -> Result<OwnServer, E> {
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
        let (loaded, ready) = mpsc::channel();
        let failed = loaded.clone();
        let load = move || {
            let service = load()?;
            // Nobody waits for it if the program has ended.
            let _ = loaded.send(Ok(Arc::clone(&service)));
            Ok::<_, E>(service as Arc<dyn Backend>)
        };
        let thread = std::thread::spawn(move || {
            if let Err(error) = server.run(load) {
                let _ = failed.send(Err(error));
            }
        });
        let ended = || E::from(ServeError::Option { what: "the server has ended".into() });
        let service = ready.recv().map_err(|_| ended())??;
        // The server makes itself ready for the model's answers before it gives any.
        while !handle.is_ready() {
            match ready.recv_timeout(LOOK) {
                Ok(Err(error)) => return Err(error),
                Ok(Ok(_)) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
            }
        }
        Ok(OwnServer { service, handle, thread: Some(thread), address })
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        self.handle.end();
        if let Some(thread) = self.thread.take() {
            // Its panic was reported where it happened.
            let _ = thread.join();
        }
    }
}

/// A server under load.
pub struct ServeBench {
    target: LoadTarget,
    rows: u64,
    own: Option<OwnServer>,
    steps: Option<StepTimes>,
}

impl ServeBench {
    /// A server of this process. `host` is a place like that of its model on which steps are measured while it has nothing
    /// to do; nothing where clocks are steady, or cards can be open once only.
    ///
    /// # Errors
    /// What measuring fails with.
    pub fn of_own(own: OwnServer, host: Option<Host>, seed: u64) -> Result<ServeBench> {
        let vocab = own.service.model().shape().vocab;
        let steps = host.map(|host| StepTimes::new(host, &own.service)).transpose()?;
        let bench = ServeBench::of_other(own.address, None, vocab, seed);
        Ok(ServeBench { own: Some(own), steps, ..bench })
    }

    /// Another server of this machine, and how many tokens its model has.
    #[must_use]
    pub fn of_other(address: SocketAddr, key: Option<String>, vocab: u64, seed: u64) -> ServeBench {
        let target = LoadTarget { address, key, model: None, vocab, seed, timeout: TIMEOUT };
        ServeBench { target, rows: 0, own: None, steps: None }
    }

    /// Tokens of a request at most, where the server is this process.
    #[must_use]
    pub fn context(&self) -> Option<usize> {
        self.own.as_ref().map(|own| own.service.options().context)
    }

    /// Asks once for each client, so that memory is touched and code is paged in.
    ///
    /// # Errors
    /// [`BenchError::Load`] if a request fails.
    pub fn warm(&self, load: ServiceLoad) -> Result<()> {
        let target = LoadTarget { seed: self.target.seed ^ WARM, ..self.target.clone() };
        let load = ServiceLoad { requests: 1, arrivals: Arrivals::Closed, ..load };
        match load_server(&target, load, |_| ())?.failed.first() {
            None => Ok(()),
            Some(first) => {
                let what = format!("a request before the first row failed: {first}");
                Err(BenchError::Load(what))
            }
        }
    }

    /// What clients see of a load, beside what is foretold where the server is this process. `measuring` is called before
    /// this machine is measured, `tell` with how many requests are over.
    ///
    /// # Errors
    /// As [`load_server`], and what measuring fails with.
    pub fn row(
        &mut self,
        load: ServiceLoad,
        measuring: impl Fn(),
        tell: impl Fn(usize) + Send + Sync + 'static,
    ) -> Result<ServeRow> {
        // Each row has prompts of its own.
        let seed = self.target.seed.wrapping_add(self.rows << 32);
        self.rows += 1;
        if let Some(steps) = &mut self.steps {
            measuring();
            steps.begin()?;
        }
        let status = |own: &Option<OwnServer>| own.as_ref().map(|own| own.service.status());
        let before = status(&self.own);
        let seen = load_server(&LoadTarget { seed, ..self.target.clone() }, load, tell)?;
        let after = status(&self.own);
        if let Some(steps) = &mut self.steps {
            measuring();
            steps.measure()?;
        }
        let forecast = match &self.steps {
            Some(steps) => Some(steps.forecast(load)?),
            None => self.own.as_ref().map(|own| own.service.forecast(load)),
        };
        let meanwhile = before.zip(after).map(|(before, after)| meanwhile(&before, &after));
        Ok(ServeRow::new(load, &seen, meanwhile, forecast.as_ref()))
    }
}

/// What steps take on threads of this machine, measured before and after each row, so that the prediction and what it is
/// compared with meet the same neighbours.
struct StepTimes {
    host: Host,
    model: Arc<Model>,
    planned: ServicePlan,
    calibration: Calibration,
}

impl StepTimes {
    fn new(host: Host, service: &Service) -> Result<StepTimes> {
        let model = Arc::clone(service.model());
        let planned = ServicePlan::on_host(&host, &model, service.options())?;
        let calibration = Calibration::new(&host, &model, &planned.plan)?;
        Ok(StepTimes { host, model, planned, calibration })
    }

    /// Begins anew: what was measured before another row does not count.
    fn begin(&mut self) -> Result<()> {
        self.calibration = Calibration::new(&self.host, &self.model, &self.planned.plan)?;
        self.measure()
    }

    fn measure(&mut self) -> Result<()> {
        Ok(self.calibration.round(&self.host, &self.model, &self.planned.plan)?)
    }

    fn forecast(&self, load: ServiceLoad) -> Result<Forecast> {
        let priced = self.calibration.priced(&self.host, &self.planned.plan)?;
        Ok(self.planned.priced(priced)?.forecast(load))
    }
}

/// What a service did between two looks.
fn meanwhile(before: &Status, after: &Status) -> OwnSteps {
    let copies = after.card_seconds.iter().enumerate();
    let took = copies.map(|(copy, now)| now - before.card_seconds.get(copy).unwrap_or(&0.0));
    // Copies of the model work side by side.
    let card_seconds = took.reduce(f64::max);
    OwnSteps { steps: after.steps - before.steps, card_seconds }
}
