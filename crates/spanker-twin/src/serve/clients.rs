// SPDX-License-Identifier: Apache-2.0
//! The programs that are connected to a card's socket. A program that sends garbage, half a message or too much
//! loses its own connection and nothing else.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::event::{PollFd, PollFlags};
use spanker_runtime::message::{Parsed, parse};

use crate::card::{Card, ClientId};

/// The most programs at a time.
const MOST: usize = 64;
/// Bytes of answers that may wait for a program that does not read them.
const MOST_WAITING: usize = 32 << 20;
/// Bytes read at a time.
const CHUNK: usize = 256 << 10;
/// Bytes at the end of an answer that are withheld until it is due.
const WITHHELD: usize = 32;

/// A connected program.
struct Client {
    id: ClientId,
    stream: UnixStream,
    incoming: Vec<u8>,
    /// When the first byte of `incoming` came.
    since: u64,
    outgoing: VecDeque<u8>,
    /// Bytes of `outgoing` that are not to be sent before the time.
    withheld: Option<(usize, u64)>,
    /// To be cut off once `outgoing` is empty.
    leaves: bool,
    /// Requests are left in `incoming` until the program reads its answers.
    stalled: bool,
}

impl Client {
    /// Bytes that may be sent now.
    fn sendable(&self, now: u64) -> usize {
        match self.withheld {
            Some((withheld, due)) if due > now => self.outgoing.len() - withheld,
            _ => self.outgoing.len(),
        }
    }

    /// Sends what it can. False if the program is gone.
    fn send(&mut self, now: u64) -> bool {
        let mut left = self.sendable(now);
        while left > 0 {
            let (first, _) = self.outgoing.as_slices();
            match self.stream.write(&first[..left.min(first.len())]) {
                Ok(0) => return false,
                Ok(count) => {
                    self.outgoing.drain(..count);
                    left -= count;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return false,
            }
        }
        if self.withheld.is_some_and(|(_, due)| due <= now) {
            self.withheld = None;
        }
        true
    }

    /// Reads what is there. False if the program is gone.
    fn receive(&mut self, now: u64) -> bool {
        if self.incoming.is_empty() {
            self.since = now;
        }
        let filled = self.incoming.len();
        self.incoming.resize(filled + CHUNK, 0);
        let outcome = self.stream.read(&mut self.incoming[filled..]);
        let count = match &outcome {
            Ok(count) => *count,
            Err(_) => 0,
        };
        self.incoming.truncate(filled + count);
        match outcome {
            Ok(count) => count > 0,
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }
}

/// All connected programs, and the socket at which they come in.
pub(super) struct Clients {
    listener: UnixListener,
    all: Vec<Client>,
    next: u64,
}

impl Clients {
    pub(super) fn new(listener: UnixListener) -> io::Result<Clients> {
        listener.set_nonblocking(true)?;
        Ok(Clients { listener, all: Vec::new(), next: 1 })
    }

    /// What to wait for: the listener, then every program.
    pub(super) fn register<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        // One too many waits outside until another leaves.
        let events = if self.all.len() < MOST { PollFlags::IN } else { PollFlags::empty() };
        fds.push(PollFd::new(&self.listener, events));
        for client in &self.all {
            let mut flags = PollFlags::empty();
            if !client.stalled && !client.leaves {
                flags |= PollFlags::IN;
            }
            if client.outgoing.len() > client.withheld.map_or(0, |(withheld, _)| withheld) {
                flags |= PollFlags::OUT;
            }
            fds.push(PollFd::new(&client.stream, flags));
        }
    }

    /// Serves those that are ready, in the order of [`Clients::register`].
    pub(super) fn serve(&mut self, card: &mut Card, ready: &[bool], now: u64) {
        let mut gone = Vec::new();
        for (client, &ready) in self.all.iter_mut().zip(&ready[1..]) {
            if ready {
                let full = client.leaves || client.stalled;
                let alive = client.send(now) && (full || client.receive(now));
                if !alive || (client.leaves && client.outgoing.is_empty()) {
                    gone.push(client.id);
                    continue;
                }
            }
            if ready || client.stalled {
                requests(card, client);
            }
        }
        self.remove(card, &gone);
        if ready[0] {
            self.accept(card);
        }
    }

    fn remove(&mut self, card: &mut Card, gone: &[ClientId]) {
        for &id in gone {
            card.disconnect(id);
        }
        self.all.retain(|client| !gone.contains(&client.id));
    }

    fn accept(&mut self, card: &mut Card) {
        while self.all.len() < MOST {
            let Ok((stream, _)) = self.listener.accept() else { return };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            let pid = rustix::net::sockopt::socket_peercred(&stream)
                .map_or(0, |peer| peer.pid.as_raw_nonzero().get() as u32);
            let id = ClientId(self.next);
            self.next += 1;
            card.connect(id, pid);
            let (incoming, outgoing) = (Vec::new(), VecDeque::new());
            let (withheld, leaves, stalled) = (None, false, false);
            self.all.push(Client {
                id,
                stream,
                incoming,
                since: 0,
                outgoing,
                withheld,
                leaves,
                stalled,
            });
        }
    }

    /// Sends the card's answers to the programs. Returns whether there were any, and when the next withheld
    /// one is due.
    pub(super) fn replies(&mut self, card: &mut Card, now: u64) -> (bool, Option<u64>) {
        let mut any = false;
        while let Some(reply) = card.reply() {
            let Some(client) = self.all.iter_mut().find(|client| client.id == reply.client) else {
                continue;
            };
            client.outgoing.extend(&reply.bytes);
            // All but the end is sent at once, so that a long answer is complete when it is due.
            client.withheld =
                (reply.due > now).then_some((WITHHELD.min(reply.bytes.len()), reply.due));
            client.leaves |= reply.last;
            any = true;
        }
        let mut gone = Vec::new();
        for client in &mut self.all {
            if client.sendable(now) > 0 {
                let before = client.outgoing.len();
                let alive = client.send(now);
                any |= client.outgoing.len() != before;
                if !alive || (client.leaves && client.outgoing.is_empty()) {
                    gone.push(client.id);
                }
            }
        }
        self.remove(card, &gone);
        (any, self.all.iter().filter_map(|client| client.withheld.map(|(_, due)| due)).min())
    }
}

/// Passes every whole request of a program to the card, as long as the program reads the answers.
fn requests(card: &mut Card, client: &mut Client) {
    let mut used = 0;
    loop {
        // A short request can have a long answer, so the space for answers is checked before each of them.
        client.stalled = client.outgoing.len() + card.unsent() >= MOST_WAITING;
        if client.stalled {
            client.incoming.drain(..used);
            return;
        }
        match parse(&client.incoming[used..]) {
            Parsed::Request(message) => {
                let length = message.used;
                card.request(client.id, &message, client.since);
                used += length;
            }
            Parsed::Incomplete(need) => {
                client.incoming.drain(..used);
                let missing = need.saturating_sub(client.incoming.len());
                client.incoming.reserve(missing.min(CHUNK));
                return;
            }
            Parsed::Refused { error, number, sequence } => {
                card.refuse(client.id, number, sequence, error);
                client.incoming.clear();
                client.leaves = true;
                return;
            }
        }
    }
}
