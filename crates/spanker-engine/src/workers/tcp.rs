// SPDX-License-Identifier: Apache-2.0
//! Workers over TCP: how a leader reaches them, what it asks them, and the process that is a worker. A worker answers
//! questions at any time and is in one group at a time.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use spanker_fabric::Fabric;
use spanker_fabric_tcp::{
    Channel, Event, Join, Key, Limits, Listener, Options, Purpose, TcpError, lead,
};

use super::offer::Shelf;
use super::serve::serve;
use super::{CachedModel, MOST_ABOUT, MOST_NAMED, MachineInfo, Sessions, Unreached};
use crate::content::cache::Cache;
use crate::error::{EngineError, Result};
use crate::profiles::cache_folder;
use crate::{memory, models};

/// The port of a worker where nobody names one.
const PORT: u16 = 7077;
/// The most workers of a leader.
const MOST_WORKERS: usize = 255;
/// How long a worker that is asked may take to answer.
const ANSWER: Duration = Duration::from_secs(2);
/// How long workers may take to leave the group that is over.
const LEAVING: Duration = Duration::from_secs(10);
/// How often a worker that is busy is asked again.
const AGAIN: Duration = Duration::from_millis(25);
/// What a worker that is in a group says to another leader.
const BUSY: &str = "it works for another leader";

const ABOUT: &[u8] = b"about";
const ECHO: &[u8] = b"echo";
const DATA: &[u8] = b"data";
/// Bytes that a link is measured with.
const PROBE: usize = 4 << 20;
/// The longest question.
const MOST_QUESTION: usize = PROBE + 16;
/// How long an authenticated leader may be silent.
const SILENCE: Duration = Duration::from_secs(10);
/// Leaders that are answered at a time.
const MOST_LEADERS: usize = 32;
/// Round trips of a measurement.
const ROUNDS: usize = 15;

/// An error of a connection, with its advice apart.
pub(super) fn explained(error: &TcpError) -> EngineError {
    let text = error.to_string();
    let (what, hint) = match text.split_once("\nhint: ") {
        Some((what, hint)) => (what.to_owned(), Some(hint.to_owned())),
        None => (text, None),
    };
    match error {
        TcpError::KeyNeeded { .. }
        | TcpError::KeyFile { .. }
        | TcpError::KeyText { .. }
        | TcpError::Address { .. } => EngineError::Request { what, hint },
        _ => EngineError::Unavailable { what, hint },
    }
}

/// Addresses of workers as people write them, each with a port.
///
/// # Errors
/// [`EngineError::Request`] for none, too many, or one twice.
pub fn worker_addresses(text: &str) -> Result<Vec<String>> {
    let named = text.split(',').map(str::trim).filter(|one| !one.is_empty());
    let with_port = |address: &str| match address.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() && !host.is_empty() && !port.contains(']') => {
            address.to_owned()
        }
        _ => format!("{address}:{PORT}"),
    };
    let list: Vec<String> = named.map(with_port).collect();
    let twice = list.iter().enumerate().find(|(at, one)| list[..*at].contains(one));
    match (list.len(), twice) {
        (0, _) => Err(EngineError::Request {
            what: "--fabric tcp: no workers are named".into(),
            hint: Some(
                "--workers HOST:PORT,HOST:PORT, SPANKER_WORKERS, or a workers.toml in this folder"
                    .into(),
            ),
        }),
        (_, Some((_, one))) => {
            Err(EngineError::request(format!("--workers: {one} is there twice")))
        }
        (count, _) if count > MOST_WORKERS => {
            Err(EngineError::request(format!("--workers: {count}, at most {MOST_WORKERS}")))
        }
        _ => Ok(list),
    }
}

/// How a leader reaches workers at these addresses.
pub(crate) fn sessions(
    addresses: Vec<String>,
    key: Option<Key>,
    timeout: Duration,
) -> Arc<dyn Sessions> {
    Arc::new(TcpSessions::new(addresses, key, timeout))
}

/// Workers at addresses.
struct TcpSessions {
    addresses: Vec<String>,
    key: Option<Key>,
    options: Options,
}

impl TcpSessions {
    fn new(addresses: Vec<String>, key: Option<Key>, timeout: Duration) -> TcpSessions {
        let options = Options { timeout, ..Options::new(env!("CARGO_PKG_VERSION")) };
        TcpSessions { addresses, key, options }
    }

    fn dial(&self, card: usize, timeout: Duration) -> Result<Channel, TcpError> {
        Channel::dial(&self.addresses[card - 1], self.key.as_ref(), Purpose::Control, timeout)
    }

    /// One attempt at a group.
    fn attempt(&self, cards: &[usize]) -> Result<Box<dyn Fabric>, Failed> {
        let timeout = self.options.timeout;
        let dialled: Vec<_> = std::thread::scope(|scope| {
            let dial = |&card| scope.spawn(move || self.dial(card, timeout));
            let threads: Vec<_> = cards.iter().map(dial).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        let (mut channels, mut missing) = (Vec::new(), Vec::new());
        for (channel, &card) in dialled.into_iter().zip(cards) {
            match channel {
                Ok(channel) => channels.push(channel),
                Err(error) if is_final(&error) => return Err(Failed::Refused(explained(&error))),
                Err(error) => missing.push((card, error.to_string())),
            }
        }
        if !missing.is_empty() {
            return Err(Failed::Missing(missing));
        }
        let addresses: Vec<_> = channels.iter().map(Channel::address).collect();
        let error = match lead(channels, &self.options) {
            Ok((fabric, _)) => return Ok(Box::new(fabric)),
            Err(error) => error,
        };
        if is_final(&error) {
            return Err(Failed::Refused(explained(&error)));
        }
        let about = match &error {
            TcpError::Refused { address, .. }
            | TcpError::Closed { address }
            | TcpError::Corrupt { address, .. }
            | TcpError::System { address, .. }
            | TcpError::Timeout { address, .. } => Some(address),
            _ => None,
        };
        let at = addresses.iter().position(|address| Some(address) == about);
        match (error, at) {
            (TcpError::Refused { reason, .. }, Some(at)) if reason == BUSY => {
                Err(Failed::Busy(cards[at]))
            }
            (error, Some(at)) => Err(Failed::Missing(vec![(cards[at], error.to_string())])),
            (error, None) => Err(Failed::Refused(explained(&error))),
        }
    }
}

/// Why an attempt failed.
enum Failed {
    /// A worker is still, or for somebody else, in a group.
    Busy(usize),
    Missing(Vec<(usize, String)>),
    Refused(EngineError),
}

/// Whether asking again would not help.
fn is_final(error: &TcpError) -> bool {
    matches!(
        error,
        // A handshake that ends early may be that of a worker that is going: it is missing, not wrong.
        TcpError::Version { .. }
            | TcpError::KeyNeeded { .. }
            | TcpError::Request { .. }
            | TcpError::Random
    )
}

impl Sessions for TcpSessions {
    fn names(&self) -> Vec<String> {
        let own = std::iter::once("this machine".to_owned());
        own.chain(self.addresses.iter().cloned()).collect()
    }

    fn connect(&self, cards: &[usize]) -> Result<Box<dyn Fabric>, Unreached> {
        let until = Instant::now() + LEAVING.max(2 * self.options.timeout);
        loop {
            match self.attempt(cards) {
                Ok(fabric) => return Ok(fabric),
                Err(Failed::Missing(missing)) => return Err(Unreached::Missing(missing)),
                Err(Failed::Refused(error)) => return Err(Unreached::Refused(error)),
                Err(Failed::Busy(card)) if Instant::now() > until => {
                    return Err(Unreached::Missing(vec![(card, BUSY.into())]));
                }
                Err(Failed::Busy(_)) => std::thread::sleep(AGAIN),
            }
        }
    }

    fn answering(&self, among: &[usize]) -> Vec<(usize, MachineInfo)> {
        std::thread::scope(|scope| {
            let ask = |&card| {
                scope.spawn(move || {
                    let mut channel = self.dial(card, ANSWER).ok()?;
                    Some((card, about(&mut channel).ok()?))
                })
            };
            let threads: Vec<_> = among.iter().map(ask).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect()
        })
    }
}

/// What a worker says of itself.
fn about(channel: &mut Channel) -> Result<MachineInfo, TcpError> {
    let until = Instant::now() + ANSWER;
    channel.send(ABOUT, until)?;
    let answer = channel.receive(MOST_ABOUT, until)?;
    let (address, what) = (channel.address(), "a description that makes no sense");
    MachineInfo::from_bytes(answer.bytes()).ok_or(TcpError::Corrupt { address, what })
}

/// A worker as its leader sees it.
#[derive(Debug, Clone)]
pub struct ListedWorker {
    /// Its address.
    pub address: String,
    /// What it says of itself and what the link to it takes, or why it does not answer.
    pub answer: Result<(MachineInfo, LinkTimes), String>,
}

/// What a link takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkTimes {
    /// Seconds of a message there and one back, the median.
    pub round_trip: f64,
    /// Bytes in a second.
    pub bandwidth: f64,
}

/// Asks workers what they are, and measures the links to them one after the other.
#[must_use]
pub fn list_workers(addresses: &[String], key: Option<&Key>) -> Vec<ListedWorker> {
    let sessions = TcpSessions::new(addresses.to_vec(), key.cloned(), ANSWER);
    let listed = (1..=addresses.len()).map(|card| {
        let answer = sessions.dial(card, ANSWER).and_then(|mut channel| {
            let info = about(&mut channel)?;
            Ok((info, measure(&mut channel)?))
        });
        let address = addresses[card - 1].clone();
        ListedWorker { address, answer: answer.map_err(|error| error.to_string()) }
    });
    listed.collect()
}

/// What a link takes.
fn measure(channel: &mut Channel) -> Result<LinkTimes, TcpError> {
    let mut trip = |bytes: &[u8], until: Instant| {
        let begun = Instant::now();
        channel.send(bytes, until)?;
        channel.receive(16, until)?;
        Ok::<_, TcpError>(begun.elapsed().as_secs_f64())
    };
    let until = Instant::now() + ANSWER;
    let mut trips = (0..ROUNDS).map(|_| trip(ECHO, until)).collect::<Result<Vec<f64>, _>>()?;
    trips.sort_by(f64::total_cmp);
    let round_trip = trips[ROUNDS / 2];
    let data = [DATA, &vec![0; PROBE]].concat();
    let until = Instant::now() + SILENCE;
    // The first one opens the way.
    trip(&data, until)?;
    let seconds = (trip(&data, until)? - round_trip).max(1e-9);
    Ok(LinkTimes { round_trip, bandwidth: PROBE as f64 / seconds })
}

/// How a worker works.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// What it is called.
    pub name: String,
    /// Threads that it computes with.
    pub threads: usize,
    /// Bytes of memory that it may use; nothing for all that the machine has.
    pub memory: Option<u64>,
    /// Model files that it has.
    pub files: Vec<PathBuf>,
    /// Bytes of models that it keeps at most.
    pub cache_limit: u64,
}

/// What happens on a worker.
#[derive(Debug)]
#[non_exhaustive]
pub enum WorkerEvent<'a> {
    /// A leader has made it one of a group.
    Joined {
        /// Where the leader is.
        leader: String,
        /// The worker's rank, and how many ranks there are.
        rank: usize,
        /// Ranks in all.
        ranks: usize,
    },
    /// It has a model, or enough of it to begin.
    Opened {
        /// What the leader calls it.
        model: &'a str,
        /// Whether it is a file of its own.
        is_own: bool,
    },
    /// The group is over.
    Left {
        /// Bytes of the model that came over the network.
        fetched: u64,
        /// Why, if it was not the leader's wish.
        error: Option<String>,
    },
}

/// A worker that listens.
pub struct WorkerServer {
    listener: Listener,
    options: WorkerOptions,
    shelf: Shelf,
    is_busy: AtomicBool,
    leaders: AtomicUsize,
}

impl std::fmt::Debug for WorkerServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerServer").field("address", &self.address()).finish_non_exhaustive()
    }
}

impl WorkerServer {
    /// Listens at an address.
    ///
    /// # Errors
    /// [`EngineError::Request`] without a key where others than this machine can connect, [`EngineError::Unavailable`] if
    /// the system refuses, or there is no folder for a cache.
    pub fn bind(address: &str, key: Option<Key>, options: WorkerOptions) -> Result<WorkerServer> {
        let hint = || Some("set SPANKER_CACHE to one".into());
        let none = || EngineError::unavailable("no folder for models", hint());
        let folder = cache_folder().ok_or_else(none)?.join("weights");
        let cache = Cache { folder, limit: options.cache_limit };
        let folders = models::folder().into_iter().collect();
        let shelf = Shelf { files: options.files.clone(), folders, cache };
        let address = worker_addresses(address)?.remove(0);
        let listener = Listener::bind(&address, key, Limits::USUAL);
        let listener = listener.map_err(|error| explained(&error))?;
        let (is_busy, leaders) = (AtomicBool::new(false), AtomicUsize::new(0));
        Ok(WorkerServer { listener, options, shelf, is_busy, leaders })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> String {
        self.listener.address().to_string()
    }

    /// Works for one leader after the other, for ever.
    pub fn run(&self, watch: &(dyn Fn(&WorkerEvent<'_>) + Sync)) {
        let (joins, joined) = channel();
        std::thread::scope(|scope| {
            scope.spawn(move || self.work(&joined, watch));
            loop {
                let hour = Instant::now() + Duration::from_secs(3600);
                let Ok(leader) = self.listener.next(hour) else { continue };
                if self.leaders.fetch_add(1, Ordering::Relaxed) >= MOST_LEADERS {
                    self.leaders.fetch_sub(1, Ordering::Relaxed);
                    leader.refuse("it answers too many leaders");
                    continue;
                }
                let joins = joins.clone();
                scope.spawn(move || {
                    // A leader that goes away has had its answers.
                    let _ = self.answer(leader, &joins);
                    self.leaders.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
    }

    /// Answers a leader's questions until it goes away or asks this worker to join.
    fn answer(&self, mut leader: Channel, joins: &Sender<Join>) -> Result<(), TcpError> {
        loop {
            let until = Instant::now() + SILENCE;
            match leader.next(MOST_QUESTION, until)? {
                Event::Message(mut channel, question) => {
                    match question.bytes() {
                        ABOUT => channel.send(&self.info().to_bytes(), until)?,
                        bytes if bytes == ECHO || bytes.starts_with(DATA) => {
                            channel.send(ECHO, until)?;
                        }
                        _ => {
                            channel.refuse("it does not know the question");
                            return Ok(());
                        }
                    }
                    leader = channel;
                }
                Event::Join(join) if self.is_busy.swap(true, Ordering::AcqRel) => {
                    join.refuse(BUSY);
                    return Ok(());
                }
                Event::Join(join) => {
                    // The thread that works is there as long as this one.
                    let _ = joins.send(join);
                    return Ok(());
                }
            }
        }
    }

    fn work(&self, joined: &Receiver<Join>, watch: &(dyn Fn(&WorkerEvent<'_>) + Sync)) {
        for join in joined {
            let (fetched, error) = self.serve(join, watch);
            self.is_busy.store(false, Ordering::Release);
            watch(&WorkerEvent::Left { fetched, error });
        }
    }

    /// Serves one group.
    fn serve(
        &self,
        join: Join,
        watch: &(dyn Fn(&WorkerEvent<'_>) + Sync),
    ) -> (u64, Option<String>) {
        let (leader, rank, ranks) = (join.leader().to_string(), join.rank(), join.ranks());
        let options = Options::new(env!("CARGO_PKG_VERSION"));
        let mut fabric = match join.accept(&self.listener, &options) {
            Ok((fabric, _)) => fabric,
            Err(error) => return (0, Some(error.to_string())),
        };
        watch(&WorkerEvent::Joined { leader, rank, ranks });
        let (served, outcome) = serve(&mut fabric, &self.shelf, self.options.threads, &|served| {
            watch(&WorkerEvent::Opened { model: &served.model, is_own: served.is_own });
        });
        let fetched = served.map_or(0, |served| served.fetched);
        (fetched, outcome.err().map(|error| error.to_string()))
    }

    fn info(&self) -> MachineInfo {
        let options = &self.options;
        let entries = self.shelf.cache.entries();
        let cached = entries.into_iter().take(MOST_NAMED).map(|entry| CachedModel {
            name: crate::printable(&entry.name),
            id: entry.id[..16].to_owned(),
            length: entry.length,
            held: entry.held,
        });
        MachineInfo {
            name: options.name.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            processor: crate::profiles::processor_name(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            threads: options.threads,
            memory: options.memory.unwrap_or_else(memory::of_machine),
            busy: self.is_busy.load(Ordering::Acquire),
            cached: cached.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_get_a_port_and_nonsense_is_refused() {
        let list = worker_addresses("one, two:9, 10.0.0.3,[::1]:7,[::1]").unwrap();
        assert_eq!(list, ["one:7077", "two:9", "10.0.0.3:7077", "[::1]:7", "[::1]:7077"]);
        for bad in ["", " , ", "one,one:7077"] {
            assert!(worker_addresses(bad).is_err(), "{bad:?}");
        }
    }
}
