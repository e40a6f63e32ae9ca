// SPDX-License-Identifier: Apache-2.0
//! Where a worker is reached. One thread takes connections and shakes hands with all of them at once.
//!
//! Until a peer has shown that it knows the key, it costs a socket and less than a kilobyte, for a few seconds: it may send
//! two messages of 48 bytes, and nothing of its own choice is parsed. If there are too many of such peers, the one that
//! has been there longest makes way. Whatever is wrong with what a peer sends, the answer is the same: the connection is
//! closed, after the same 48 bytes.

use std::collections::VecDeque;
use std::io::{ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use snow::TransportState;

use crate::channel::{INTENT, Intent, UNREACHABLE, key_for};
use crate::link::{Link, prepare};
use crate::noise::{HELLO, Role, handshake};
use crate::wait::{left, sleep_on};
use crate::{Channel, Id, Key, TcpError};

/// How much a listener takes at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections that have not shown yet that they know the key.
    pub unauthenticated: usize,
    /// How long they may take for that.
    pub handshake: Duration,
    /// Connections that have, and that nobody has asked for yet.
    pub waiting: usize,
}

impl Limits {
    /// What suits a worker: 64 strangers for 3 seconds, 256 connections that wait.
    pub const USUAL: Limits =
        Limits { unauthenticated: 64, handshake: Duration::from_secs(3), waiting: 256 };
}

/// A socket that leaders and other workers connect to. Dropping it closes it.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    key: Option<Key>,
    shared: Arc<Shared>,
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread hands over.
#[derive(Debug, Default)]
struct Shared {
    waiting: Mutex<VecDeque<(Intent, Link)>>,
    arrived: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(Intent, Link)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener {
    /// Listens at `address`, as in `127.0.0.1:7077`; port 0 is any that is free.
    ///
    /// # Errors
    /// [`TcpError::KeyNeeded`] without a key where others than this machine can connect; [`TcpError::Address`] or
    /// [`TcpError::System`].
    pub fn bind(address: &str, key: Option<Key>, limits: Limits) -> Result<Listener, TcpError> {
        let wrong = |reason| TcpError::Address { text: address.to_owned(), reason };
        let found = address.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
        let address = { found }.next().ok_or_else(|| wrong("has no address".into()))?;
        let agreed = key_for(key.as_ref(), address)?;
        let system = |error: std::io::Error| TcpError::System {
            what: "cannot listen at",
            address,
            reason: error.to_string(),
        };
        let socket = TcpListener::bind(address).map_err(system)?;
        socket.set_nonblocking(true).map_err(system)?;
        let address = socket.local_addr().map_err(system)?;
        let (stopped, stop) = std::io::pipe().map_err(system)?;
        let shared = Arc::new(Shared::default());
        let mut reception =
            Reception { socket, key: agreed, limits, stopped, pending: VecDeque::new() };
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("spanker-listener".into());
        let thread = thread.spawn(move || reception.run(&theirs)).map_err(system)?;
        Ok(Listener { address, key, shared, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens, with the port that it got.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// Waits for a leader.
    ///
    /// # Errors
    /// [`TcpError::Timeout`] at `deadline`.
    pub fn next(&self, deadline: Instant) -> Result<Channel, TcpError> {
        let timeout = left(deadline);
        let late = TcpError::Timeout { address: self.address, what: "leader", timeout };
        self.take(deadline, |intent| *intent == Intent::Control).map(channel).ok_or(late)
    }

    /// Waits for a connection for bulk data under this number.
    ///
    /// # Errors
    /// [`TcpError::Timeout`] at `deadline`.
    pub fn next_bulk(&self, id: Id, deadline: Instant) -> Result<Channel, TcpError> {
        let timeout = left(deadline);
        let late = TcpError::Timeout { address: self.address, what: "bulk data", timeout };
        self.take(deadline, |intent| *intent == Intent::Bulk(id)).map(channel).ok_or(late)
    }

    /// Waits for a connection of a rank above `rank` of a group.
    pub(crate) fn next_of(&self, group: Id, rank: u32, deadline: Instant) -> Option<(u32, Link)> {
        let fits = |intent: &Intent| matches!(intent, Intent::Mesh(id, from) if *id == group && *from > rank);
        match self.take(deadline, fits)? {
            (Intent::Mesh(_, from), link) => Some((from, link)),
            _ => None,
        }
    }

    fn take(&self, deadline: Instant, fits: impl Fn(&Intent) -> bool) -> Option<(Intent, Link)> {
        let mut waiting = self.shared.lock();
        loop {
            if let Some(at) = waiting.iter().position(|(intent, _)| fits(intent)) {
                return waiting.remove(at);
            }
            let most = left(deadline);
            if most.is_zero() {
                return None;
            }
            let woken = self.shared.arrived.wait_timeout(waiting, most);
            waiting = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn channel((_, link): (Intent, Link)) -> Channel {
    Channel { link }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // The thread sees the end of the pipe.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread's side.
struct Reception {
    socket: TcpListener,
    key: Key,
    limits: Limits,
    stopped: PipeReader,
    /// Oldest first.
    pending: VecDeque<Pending>,
}

/// A connection that has not shown yet that it knows the key.
struct Pending {
    stream: TcpStream,
    address: SocketAddr,
    until: Instant,
    came: [u8; HELLO],
    filled: usize,
    /// Set between its first message and its second.
    noise: Option<TransportState>,
}

/// What came of looking at a connection.
enum Step {
    Waits,
    Done(Intent, Box<Link>),
    Ends,
}

impl Reception {
    fn run(&mut self, shared: &Shared) {
        loop {
            let (is_over, has_new, ready) = self.sleep();
            if is_over {
                return;
            }
            let now = Instant::now();
            let old = std::mem::take(&mut self.pending);
            for (mut pending, is_ready) in old.into_iter().zip(ready) {
                let step = if is_ready { pending.advance(&self.key) } else { Step::Waits };
                match step {
                    Step::Waits if now < pending.until => self.pending.push_back(pending),
                    Step::Done(intent, link) => self.hand_over(shared, intent, *link),
                    _ => {}
                }
            }
            if has_new {
                self.accept();
            }
        }
    }

    /// Waits for something to do: to stop, to accept, or which of the connections to look at.
    fn sleep(&self) -> (bool, bool, Vec<bool>) {
        let mut sockets =
            vec![(self.stopped.as_fd(), PollFlags::IN), (self.socket.as_fd(), PollFlags::IN)];
        sockets.extend(self.pending.iter().map(|pending| (pending.stream.as_fd(), PollFlags::IN)));
        let first = self.pending.front().map(|pending| left(pending.until));
        // A millisecond more, so that the time is over for sure.
        let most = first.map_or(Duration::from_secs(3600), |left| left + Duration::from_millis(1));
        let ready = sleep_on(&sockets, most);
        (ready[0], ready[1], ready[2..].to_vec())
    }

    fn accept(&mut self) {
        for _ in 0..self.limits.unauthenticated.max(1) {
            let (stream, address) = match self.socket.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    // Most likely there are no more descriptors: strangers give theirs back, and this does not spin.
                    self.pending.pop_front();
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            };
            if self.pending.len() >= self.limits.unauthenticated {
                self.pending.pop_front();
            }
            if prepare(&stream, self.limits.handshake).is_ok() {
                let until = Instant::now() + self.limits.handshake;
                let (came, filled, noise) = ([0; HELLO], 0, None);
                self.pending.push_back(Pending { stream, address, until, came, filled, noise });
            }
        }
    }

    fn hand_over(&self, shared: &Shared, intent: Intent, link: Link) {
        let mut waiting = shared.lock();
        if waiting.len() >= self.limits.waiting {
            waiting.pop_front();
        }
        waiting.push_back((intent, link));
        drop(waiting);
        shared.arrived.notify_all();
    }
}

impl Pending {
    /// Reads what has come, and answers.
    fn advance(&mut self, key: &Key) -> Step {
        loop {
            match (&self.stream).read(&mut self.came[self.filled..]) {
                Ok(0) => return Step::Ends,
                Ok(read) => self.filled += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Step::Waits,
                Err(_) => return Step::Ends,
            }
            if self.filled < HELLO {
                continue;
            }
            self.filled = 0;
            match self.noise.take() {
                None => match self.answer(key) {
                    Some(noise) => self.noise = Some(noise),
                    None => return Step::Ends,
                },
                Some(noise) => return self.admit(noise),
            }
        }
    }

    /// The first message is there: the second one goes out.
    fn answer(&self, key: &Key) -> Option<TransportState> {
        let mut noise = handshake(key, Role::Listens).ok()?;
        noise.read_message(&self.came, &mut []).ok()?;
        let mut hello = [0; HELLO];
        noise.write_message(&[], &mut hello).ok()?;
        // So few bytes fit into the buffer of a socket that nothing was sent over.
        let written = (&self.stream).write(&hello).ok()?;
        if written == HELLO { noise.into_transport_mode().ok() } else { None }
    }

    /// The third is: it cannot be a copy of an old one, because it is sealed under keys of this connection.
    fn admit(&self, mut noise: TransportState) -> Step {
        let mut intent = [0; INTENT];
        if noise.read_message(&self.came, &mut intent).is_err() {
            return Step::Ends;
        }
        match (Intent::of(&intent), self.stream.try_clone()) {
            (Some(intent), Ok(stream)) => {
                let link = Link::new(stream, self.address, noise);
                match link.set_timeout(Some(UNREACHABLE)) {
                    Ok(()) => Step::Done(intent, Box::new(link)),
                    Err(_) => Step::Ends,
                }
            }
            _ => Step::Ends,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stranger_costs_less_than_a_kilobyte() {
        assert!(size_of::<Pending>() < 1024, "{} bytes", size_of::<Pending>());
    }
}
