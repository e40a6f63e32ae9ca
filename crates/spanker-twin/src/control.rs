// SPDX-License-Identifier: Apache-2.0
//! What a program asks a supervisor, over the socket in the twin's directory. The supervisor's side is in
//! `supervisor.rs`.

use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde::{Deserialize, Serialize};
use spanker_topology::{BytesPerSecond, Seconds, Shape};

use crate::error::Tried;
use crate::{Pace, TwinError, frame, home};

/// How long a supervisor may take. One that starts a twin answers when that is done, which takes 5 s at most.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How often to look whether a supervisor that has not answered is stopped.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// What a program asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Ask for the state of everything.
    Status,
    /// Kill a card.
    Kill(u32),
    /// Stop a card: it does not answer at all.
    Stop(u32),
    /// Let a card answer but do no more work.
    Stick(u32),
    /// Let a card compute garbage.
    Garble(u32),
    /// Let a card take so many times as long.
    Slow(u32, f64),
    /// Cut the link between two cards.
    Cut(u32, u32),
    /// Flip bits on the link between two cards, at this rate.
    Corrupt(u32, u32, f64),
    /// Put something right again, or everything.
    Restore(Option<Target>),
    /// Take the twin down.
    Down,
}

/// A part of a twin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// A card.
    Card(u32),
    /// The link between two cards.
    Link(u32, u32),
}

/// What the supervisor answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Answer {
    /// It is done.
    Done,
    /// How everything is.
    Status(Box<Status>),
    /// There is no such card or link.
    Unknown(String),
    /// It could not be done.
    Failed(String),
    /// The twin is down; these files in its directory belong to others.
    Left(Vec<String>),
}

/// How a twin is, and the schema of `spanker twin status --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// The directory.
    pub dir: PathBuf,
    /// The supervisor's process.
    #[serde(rename = "keeper")]
    pub supervisor: u32,
    /// Which cards, in a few words.
    pub title: String,
    /// How they are wired.
    pub topology: Shape,
    /// How fast they are.
    pub pace: Pace,
    /// Where randomness began.
    pub seed: u64,
    /// The cards in order.
    pub cards: Vec<CardStatus>,
    /// The links, by their lower card.
    pub links: Vec<LinkStatus>,
}

/// How a card is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardStatus {
    /// Its index.
    pub card: u32,
    /// `up`, `dead`, `stopped` or `silent`.
    pub state: String,
    /// What was done to it: `stuck`, `garbling`, `4 times as slow`; or how it ended.
    pub faults: Vec<String>,
    /// Its process, if it lives.
    pub pid: Option<u32>,
    /// Its serial number.
    pub serial: u64,
    /// Its profile.
    pub profile: String,
    /// Its socket.
    pub path: PathBuf,
}

/// How a link is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkStatus {
    /// The two cards.
    pub between: [u32; 2],
    /// Their ports.
    pub ports: [u32; 2],
    /// `up`, `training`, `down`, `fault` or `cut`.
    pub state: String,
    /// Lanes in use.
    pub lanes: u32,
    /// Payload that it sustains from the first card to the second, in bytes per second.
    pub bandwidth: BytesPerSecond,
    /// The fixed cost of a message, in seconds.
    pub latency: Seconds,
    /// The probability that a bit on the wire flips.
    pub bit_error_rate: f64,
}

/// How taking a twin down went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// It is down. These files stay because they belong to others.
    Down(Vec<String>),
    /// There was none.
    WasDown,
    /// There was none, but what a dead one had left is removed.
    Swept,
}

/// Asks the supervisor of a directory.
///
/// # Errors
/// [`TwinError::Down`] without a twin, [`TwinError::Unknown`] for a card or link that is not there,
/// [`TwinError::Failed`] for what could not be done or was not answered in time.
pub fn ask(dir: &Path, request: &Request) -> Result<Answer, TwinError> {
    let stream = connect(dir)?;
    match exchange(&stream, request) {
        Ok(Answer::Unknown(text)) => Err(TwinError::Unknown(text)),
        Ok(Answer::Failed(text)) => Err(TwinError::Failed(text)),
        Ok(answer) => Ok(answer),
        Err(error) => {
            let pid = supervisor(&stream).map_or_else(|| "?".into(), |pid| pid.to_string());
            let what =
                if error.kind() == ErrorKind::TimedOut { "does not answer" } else { "failed" };
            Err(TwinError::Failed(format!("the supervisor (pid {pid}) {what}: {error}")))
        }
    }
}

/// Takes the twin of a directory down, whatever state it is in. A supervisor that does not answer is killed;
/// its cards then end by themselves.
///
/// # Errors
/// [`TwinError::Directory`] for a directory that no twin would use, [`TwinError::Failed`] if the twin does
/// not go away.
pub fn down(dir: &Path) -> Result<Ending, TwinError> {
    match home::check(dir) {
        Err(TwinError::System { source, .. }) if source.kind() == ErrorKind::NotFound => {
            return Ok(Ending::WasDown);
        }
        outcome => outcome?,
    }
    let stream = match connect(dir) {
        Err(TwinError::Down { .. }) => {
            if !home::littered(dir) {
                return Ok(Ending::WasDown);
            }
            home::sweep(dir).tried(|| format!("empty {}", dir.display()))?;
            match connect(dir) {
                Err(TwinError::Down { .. }) => return Ok(Ending::Swept),
                // It was just coming up.
                outcome => outcome?,
            }
        }
        outcome => outcome?,
    };
    let process = supervisor(&stream).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    match exchange(&stream, &Request::Down) {
        Ok(Answer::Left(names)) => {
            // Everything is gone but the process itself, which is about to end.
            process.inspect(|process| drop(readable(process, TIMEOUT)));
            return Ok(Ending::Down(names));
        }
        Ok(answer) => return Err(TwinError::Failed(format!("the supervisor answers {answer:?}"))),
        Err(_) => {}
    }
    if let Some(pid) = supervisor(&stream) {
        // It may have ended in the meantime.
        let _ = kill_process(pid, Signal::KILL);
    }
    let end = Instant::now() + TIMEOUT;
    while dir.join(home::CONTROL_SOCKET).exists() {
        if Instant::now() > end {
            let text = format!("{}: the twin does not go away", dir.display());
            return Err(TwinError::Failed(text));
        }
        home::sweep(dir).tried(|| format!("empty {}", dir.display()))?;
    }
    Ok(Ending::Down(Vec::new()))
}

fn connect(dir: &Path) -> Result<UnixStream, TwinError> {
    match UnixStream::connect(dir.join(home::CONTROL_SOCKET)) {
        Err(error)
            if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) =>
        {
            Err(TwinError::Down { dir: dir.to_path_buf() })
        }
        outcome => outcome.tried(|| format!("reach the twin in {}", dir.display())),
    }
}

/// The process that listens at the other end. The kernel says so, so a stale file cannot mislead.
fn supervisor(stream: &UnixStream) -> Option<Pid> {
    rustix::net::sockopt::socket_peercred(stream).ok().map(|peer| peer.pid)
}

/// Whether a process is stopped, so that it will not answer however long one waits.
fn is_stopped(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in brackets and may have any in it.
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

/// Waits until there is something to read, or the end of it.
fn readable(fd: impl AsFd, time: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let time = Timespec::try_from(time).map_err(io::Error::other)?;
    Ok(poll(&mut fds, Some(&time))? > 0)
}

fn exchange(stream: &UnixStream, request: &Request) -> io::Result<Answer> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    frame::send(stream, request, &[])?;
    let deadline = Instant::now() + TIMEOUT;
    while !readable(stream, POLL_INTERVAL)? {
        if Instant::now() > deadline || supervisor(stream).is_some_and(is_stopped) {
            return Err(ErrorKind::TimedOut.into());
        }
    }
    let answer = frame::receive(stream, Some(deadline))?;
    answer.map(|(answer, _)| answer).ok_or_else(|| ErrorKind::UnexpectedEof.into())
}
