// SPDX-License-Identifier: Apache-2.0
//! The supervisor: it starts the cards of a twin, watches them, serves requests at its control socket, and takes
//! everything down. It holds the lock of the directory for as long as the twin lives.
//!
//! | what ends | what follows |
//! |---|---|
//! | the supervisor, by a signal | it ends its cards and removes the directory |
//! | the supervisor, killed | cards see the end of their sockets, leave, and sweep the directory |
//! | a card | the supervisor records it; the socket's file stays, so that programs see the card as dead |
//! | who started it, before the twin is up | as a signal to the supervisor |
//! | who started it, later | nothing |

mod card;
mod fleet;
mod launch;

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use spanker_runtime::AbiVersion;
use spanker_topology::Cluster;

use crate::control::{Answer, Request, Status};
use crate::error::Tried;
use crate::home::{self, Home};
use crate::orders::Order;
use crate::{Pace, Signals, TwinError, frame, specs};
use fleet::Fleet;

pub use launch::{card, daemon, launch};

/// How long all cards may take until they are linked.
const STARTING: Duration = Duration::from_secs(5);

/// How long a card may take to answer.
const ANSWER: Duration = Duration::from_secs(1);

/// How often to say how far a twin has come.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);

/// How long a program may take to send its request.
const ASKING: Duration = Duration::from_secs(1);

/// What a twin is to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TwinSpec {
    /// The directory.
    pub dir: PathBuf,
    /// The cards and their wires.
    pub cluster: Cluster,
    /// Which cards, in a few words.
    pub title: String,
    /// How fast they are.
    pub pace: Pace,
    /// Where randomness begins.
    pub seed: u64,
    /// The bit error rate of every link, if not the profile's.
    pub bit_error_rate: Option<f64>,
    /// The version of the ABI that the cards speak.
    #[serde(with = "crate::spec::version")]
    pub abi: AbiVersion,
}

/// How a twin comes up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum News {
    /// So many cards are being started.
    Starting(usize),
    /// So many links are up, of so many.
    Linking(usize, usize),
    /// Everything is up.
    Ready(Box<Status>),
    /// It is not going to be.
    Failed {
        /// Why.
        message: String,
        /// What to do about it.
        hint: Option<String>,
    },
}

/// The program that runs as supervisor and as card: with the arguments `twin card DIR INDEX` it calls [`card`],
/// with `twin keeper DIR` it calls [`daemon`].
#[derive(Debug, Clone)]
pub struct Program {
    path: PathBuf,
    name: String,
    /// Whether what cards say about their own faults is dropped.
    quiet: bool,
}

impl Program {
    /// This very program.
    ///
    /// # Errors
    /// The system does not say where it is.
    pub fn this(quiet: bool) -> Result<Program, TwinError> {
        let path = std::env::current_exe().tried(|| "find this program".into())?;
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into());
        // A program whose file was replaced while it runs can still be started from here.
        let path = if path.exists() { path } else { "/proc/self/exe".into() };
        Ok(Program { path, name, quiet })
    }
}

/// What `twin.json` says.
#[derive(Debug, Serialize)]
struct Record<'a> {
    format: u32,
    #[serde(rename = "keeper")]
    supervisor: u32,
    title: &'a str,
    topology: &'static str,
    pace: Pace,
    seed: u64,
    bit_error_rate: Option<f64>,
    /// The process of every card; none for a dead one.
    cards: Vec<Option<u32>>,
}

/// Starts a twin and supervises it until a signal or a request ends it; then nothing of it is left. While it starts,
/// the end of `starter`, the socket to the process that started it, counts as a signal, and so does `false` from
/// `report` when everything is up: nobody received the report. Returns the files in the directory that stay because
/// they belong to others.
///
/// # Errors
/// Why the twin did not come up. Nothing of it is left then either.
pub fn supervise(
    spec: &TwinSpec,
    program: Program,
    signals: &Signals,
    starter: Option<&UnixStream>,
    report: &mut dyn FnMut(News) -> bool,
) -> Result<Vec<String>, TwinError> {
    let mut cards = specs(&spec.cluster, spec.pace, spec.seed)?;
    if let Some(rate) = spec.bit_error_rate {
        let ports = cards.iter_mut().flat_map(|card| &mut card.ports);
        ports.for_each(|port| port.bit_error_rate = rate);
    }
    cards.iter_mut().for_each(|card| card.abi = spec.abi);
    raise_limit();
    let home = Home::claim(&spec.dir)?;
    let control = home.dir().join(home::CONTROL_SOCKET);
    let control = UnixListener::bind(&control).tried(|| format!("bind {}", control.display()))?;
    let fleet = Fleet::new(program, home.dir().to_path_buf(), cards);
    let mut supervisor = Supervisor { spec, home, fleet };
    supervisor.start(signals, starter, report)?;
    let asker = supervisor.run(signals, &control);
    let Supervisor { home, mut fleet, .. } = supervisor;
    fleet.end();
    let left = home.release();
    if let Some(asker) = asker {
        // Whoever asked may be gone by now.
        let _ = frame::send(&asker, &Answer::Left(left.clone()), &[]);
    }
    Ok(left)
}

/// Links of many cards need many descriptors while they are sent to the cards.
fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(1 << 16).min(1 << 16);
    if limit.current.is_some_and(|current| current < most) {
        // With fewer, twins of few cards still work.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit });
    }
}

struct Supervisor<'a> {
    spec: &'a TwinSpec,
    // Before the directory, so that on any way out the cards end before that is removed.
    fleet: Fleet,
    home: Home,
}

impl Supervisor<'_> {
    fn start(
        &mut self,
        signals: &Signals,
        starter: Option<&UnixStream>,
        report: &mut dyn FnMut(News) -> bool,
    ) -> Result<(), TwinError> {
        report(News::Starting(self.spec.cluster.cards()));
        self.fleet.start()?;
        let end = Instant::now() + STARTING;
        self.record()?;
        self.until_linked(end, signals, starter, report)?;
        let status = self.status();
        match report(News::Ready(Box::new(status))) {
            true => Ok(()),
            false => Err(TwinError::Interrupted),
        }
    }

    fn until_linked(
        &mut self,
        end: Instant,
        signals: &Signals,
        starter: Option<&UnixStream>,
        report: &mut dyn FnMut(News) -> bool,
    ) -> Result<(), TwinError> {
        let mut reported = (None, Instant::now());
        let mut pause = Duration::from_millis(1);
        loop {
            let (up, all) = self.fleet.linked();
            // Repeated, so that whoever waits can distinguish waiting from hanging.
            if reported.0 != Some(up) || reported.1.elapsed() > REPORT_INTERVAL {
                report(News::Linking(up, all));
                reported = (Some(up), Instant::now());
            }
            let [hung_up] = signals.wait([starter.map(AsFd::as_fd)], Some(Duration::ZERO));
            let caught = signals.caught();
            if caught.end || hung_up {
                return Err(TwinError::Interrupted);
            }
            if let Some(card) = self.fleet.reap().first() {
                let how = self.fleet.end_of(*card);
                let text = format!("card {card} ended while the twin started: {how}");
                return Err(TwinError::Failed(text));
            }
            if up == all {
                return Ok(());
            }
            if Instant::now() > end {
                let text = format!("{up} of {all} links came up within {} s", STARTING.as_secs());
                return Err(TwinError::Failed(text));
            }
            let _ = signals.wait([starter.map(AsFd::as_fd)], Some(pause));
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// Serves requests until one asks for the end, and returns its client, which gets the answer after the end.
    fn run(&mut self, signals: &Signals, control: &UnixListener) -> Option<UnixStream> {
        loop {
            let [asked] = signals.wait([Some(control.as_fd())], None);
            let caught = signals.caught();
            if caught.end {
                return None;
            }
            if caught.child && !self.fleet.reap().is_empty() {
                self.note();
            }
            if !asked {
                continue;
            }
            let Ok((client, _)) = control.accept() else { continue };
            let deadline = Instant::now() + ASKING;
            let answer = match frame::receive(&client, Some(deadline)) {
                Ok(Some((Request::Down, _))) => return Some(client),
                Ok(Some((request, _))) => self.answer(&request),
                Ok(None) => continue,
                Err(error) => {
                    Answer::Failed(format!("the supervisor does not understand: {error}"))
                }
            };
            // Whoever asked and went away does not need to know.
            let _ = client.set_write_timeout(Some(ASKING));
            let _ = frame::send(&client, &answer, &[]);
        }
    }

    fn answer(&mut self, request: &Request) -> Answer {
        match self.obey(request) {
            Ok(answer) => answer,
            Err(TwinError::Unknown(text)) => Answer::Unknown(text),
            Err(error) => Answer::Failed(error.whole()),
        }
    }

    fn obey(&mut self, request: &Request) -> Result<Answer, TwinError> {
        let fleet = &mut self.fleet;
        match *request {
            Request::Status => return Ok(Answer::Status(Box::new(self.status()))),
            Request::Kill(card) => {
                fleet.kill(card)?;
                self.note();
            }
            Request::Stop(card) => {
                let card = fleet.card(card)?;
                card.signal(Signal::STOP)?;
                card.faults.stopped = true;
            }
            Request::Stick(card) => {
                let card = fleet.card(card)?;
                card.order(&Order::Stick { on: true }, &[])?;
                card.faults.stuck = true;
            }
            Request::Garble(card) => {
                let card = fleet.card(card)?;
                card.order(&Order::Garble { on: true }, &[])?;
                card.faults.garbling = true;
            }
            Request::Slow(card, factor) => {
                let card = fleet.card(card)?;
                card.order(&Order::Slow { factor }, &[])?;
                card.faults.slow = factor;
            }
            Request::Cut(a, b) => fleet.cut(a, b, true)?,
            Request::Corrupt(a, b, rate) => fleet.corrupt(a, b, Some(rate))?,
            Request::Restore(what) => {
                let outcome = fleet.restore(what).and_then(|()| self.until_mended());
                self.note();
                outcome?;
            }
            Request::Down => unreachable!("the end is not an answer"),
        }
        Ok(Answer::Done)
    }

    /// Waits until the links of all cards that live are up again.
    fn until_mended(&mut self) -> Result<(), TwinError> {
        let end = Instant::now() + STARTING;
        loop {
            let (up, all) = self.fleet.linked();
            if up == all {
                return Ok(());
            }
            if Instant::now() > end {
                let text = format!("{up} of {all} links came up again");
                return Err(TwinError::Failed(text));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn status(&mut self) -> Status {
        let (cards, links) = self.fleet.status();
        Status {
            dir: self.home.dir().to_path_buf(),
            supervisor: std::process::id(),
            title: self.spec.title.clone(),
            topology: self.spec.cluster.shape(),
            pace: self.spec.pace,
            seed: self.spec.seed,
            cards,
            links,
        }
    }

    /// Writes `twin.json`.
    fn record(&self) -> Result<(), TwinError> {
        let record = Record {
            format: 1,
            supervisor: std::process::id(),
            title: &self.spec.title,
            topology: self.spec.cluster.shape().name(),
            pace: self.spec.pace,
            seed: self.spec.seed,
            bit_error_rate: self.spec.bit_error_rate,
            cards: self.fleet.pids(),
        };
        let text = serde_json::to_string_pretty(&record).expect("a record is plain data");
        self.home.write(home::RECORD, &(text + "\n"))
    }

    /// Writes `twin.json` anew. It is for people: where it cannot be written, the twin goes on.
    fn note(&self) {
        let _ = self.record();
    }
}
