// SPDX-License-Identifier: Apache-2.0
//! The fabric whose ranks are connected by TCP: messages, and the end of a call.
//!
//! Everything that moves moves while a rank is in a call: there are no threads. A step is complete when what it sends is
//! with the system and what it receives has come. While a rank waits it reads from all others, whether it needs them or
//! not, so that nobody waits for a reader that waits itself.
//!
//! A call is complete when rank 0 says so. It hears from everyone first, so a call that it reports complete is complete
//! everywhere. Only if rank 0 dies between its reports to one rank and the next some ranks report its death for a call
//! that others have completed.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use spanker_collective::Rank;
use spanker_fabric::wire::{CALL, Notice, call_bytes, call_of};
use spanker_fabric::{Call, Fabric, FabricError, Message};

use crate::Options;
use crate::fault::Notices;
use crate::frame::{Head, Kind};
use crate::link::{Closed, Frame, Link};
use crate::wait::{left, sleep_on_links};

/// Bytes that may have come from a rank before this one asks for them. After that its sender waits.
const BACKLOG: usize = 64 << 20;
/// After this, a rank reports to rank 0 which call it is waiting in.
const STUCK: Duration = Duration::from_millis(10);
/// How long an end that is dropped waits for the others to read what it said last.
const LINGER: Duration = Duration::from_millis(100);

/// One rank's end of a group.
///
/// Dropping an end closes its connections: whoever still needs it gets [`FabricError::Died`].
#[derive(Debug)]
pub struct TcpFabric {
    pub(crate) rank: Rank,
    pub(crate) peers: Vec<Peer>,
    /// Calls that are complete.
    pub(crate) number: u64,
    /// Calls that rank 0 has said to be complete.
    pub(crate) decided: u64,
    /// On rank 0: what each rank has done its part of.
    arrivals: Vec<Option<(u64, [u8; CALL])>>,
    pub(crate) notices: Notices,
    spin: Duration,
    longest: usize,
}

/// Another rank, or this one.
#[derive(Debug)]
pub(crate) struct Peer {
    /// Nothing for this rank.
    pub(crate) link: Option<Link>,
    /// What has come and nobody has asked for, with its call.
    inbox: VecDeque<([u8; CALL], Message)>,
    backlog: usize,
    sent: u64,
    received: u64,
}

impl Peer {
    /// Whether it is gone.
    pub(crate) fn is_dead(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.closed().is_some())
    }

    /// Forgets what has come.
    pub(crate) fn forget_messages(&mut self) {
        self.inbox.clear();
        self.backlog = 0;
    }

    /// Whether what it sends is read.
    fn reads(&self) -> bool {
        self.backlog <= BACKLOG
    }
}

/// The state of a rank's wait in one call.
struct Wait {
    deadline: Instant,
    begun: Option<Instant>,
    has_reported: bool,
}

impl Wait {
    fn until(deadline: Instant) -> Wait {
        Wait { deadline, begun: None, has_reported: false }
    }
}

impl TcpFabric {
    /// The end of `rank`, with its connections to all ranks.
    pub(crate) fn new(rank: Rank, links: Vec<Option<Link>>, options: &Options) -> TcpFabric {
        let ranks = links.len();
        let peer = |mut link: Option<Link>| {
            if let Some(link) = &mut link {
                link.set_limit(options.longest_message as u64);
                // A system without this setting notices later.
                let _ = link.set_timeout(options.timeout);
            }
            Peer { link, inbox: VecDeque::new(), backlog: 0, sent: 0, received: 0 }
        };
        TcpFabric {
            rank,
            peers: links.into_iter().map(peer).collect(),
            number: 0,
            decided: 0,
            arrivals: vec![None; ranks],
            notices: Notices::new(ranks),
            spin: options.spin,
            longest: options.longest_message,
        }
    }

    /// Sends a message.
    fn post(&mut self, to: Rank, call: &[u8; CALL], message: &Message) {
        let peer = &mut self.peers[to];
        let Some(link) = &mut peer.link else {
            peer.inbox.push_back((*call, message.clone()));
            return;
        };
        let head = Head { call: *call, number: peer.sent, ..Head::of_kind(Kind::Message) };
        peer.sent += 1;
        link.push(head, Some(message.clone()));
        link.flush();
    }

    /// Sends something short about the group to a rank.
    pub(crate) fn say(&mut self, to: Rank, head: Head, bytes: &[u8]) {
        if let Some(link) = &mut self.peers[to].link {
            link.push_bytes(head, bytes);
            link.flush();
        }
    }

    /// Reads what has come from a rank. Returns whether anything has.
    fn read(&mut self, from: Rank) -> Result<bool, FabricError> {
        let mut news = false;
        if let Some(link) = &mut self.peers[from].link {
            link.look_again();
        }
        loop {
            let peer = &mut self.peers[from];
            let reads = peer.reads();
            let Some(link) = peer.link.as_mut().filter(|_| reads) else {
                return Ok(news);
            };
            match link.next_frame() {
                Ok(Some(frame)) => self.sort(from, frame)?,
                Ok(None) => return Ok(news),
                Err(why) => return self.closed(from, &why).map_or(Ok(news), Err),
            }
            news = true;
        }
    }

    /// The fault of a connection that did more than end.
    fn closed(&self, peer: Rank, why: &Closed) -> Option<FabricError> {
        let rank = self.rank;
        match why {
            Closed::Ended | Closed::Lost(_) => None,
            Closed::Corrupt(_) => Some(FabricError::Corrupt { rank, peer }),
            Closed::TooLong(length) => {
                let (expected, actual) = (self.longest, usize::try_from(*length));
                let actual = actual.unwrap_or(usize::MAX);
                Some(FabricError::Length { rank, peer, expected, actual })
            }
        }
    }

    /// Puts a frame where it belongs.
    fn sort(&mut self, from: Rank, frame: Frame) -> Result<(), FabricError> {
        let (rank, Frame { head, body }) = (self.rank, frame);
        match head.kind {
            Kind::Message => {
                let peer = &mut self.peers[from];
                if head.number != peer.received {
                    return Err(FabricError::Lost { rank, peer: from });
                }
                peer.received += 1;
                // After a fault nobody asks for messages.
                if !self.notices.is_failing() {
                    peer.backlog += body.bytes().len();
                    peer.inbox.push_back((head.call, body));
                }
            }
            Kind::Arrival => self.arrivals[from] = Some((head.number, head.call)),
            Kind::Decision => self.decided = head.number.saturating_add(1),
            Kind::Notice => match Notice::of(body.bytes()) {
                Some(notice) => self.hear(from, notice),
                None => return Err(FabricError::Corrupt { rank, peer: from }),
            },
            Kind::Bytes | Kind::Join | Kind::Ready | Kind::Refusal | Kind::Start => {
                return Err(FabricError::Corrupt { rank, peer: from });
            }
        }
        Ok(())
    }

    /// Writes and reads what can be, with all ranks or those that are `needed`. Returns whether anything has come. All
    /// are read before a fault of one counts, because one may have said what the group's fault is.
    pub(crate) fn pump(&mut self, needed: impl Fn(Rank) -> bool) -> Result<bool, FabricError> {
        let (mut news, mut fault) = (false, None);
        for rank in 0..self.peers.len() {
            if let Some(link) = self.peers[rank].link.as_mut().filter(|link| link.has_unsent()) {
                news |= link.flush();
            }
            if needed(rank) {
                match self.read(rank) {
                    Ok(read) => news |= read,
                    Err(found) => fault = fault.or(Some(found)),
                }
            }
        }
        fault.map_or(Ok(news), Err)
    }

    /// Takes the messages that have come. Returns whether all have.
    fn collect(
        &mut self,
        call: &Call,
        mine: &[u8; CALL],
        receives: &[Rank],
        messages: &mut [Option<Message>],
    ) -> Result<bool, FabricError> {
        let (rank, mut all) = (self.rank, true);
        for (&from, message) in receives.iter().zip(messages) {
            if message.is_some() {
                continue;
            }
            let peer = &mut self.peers[from];
            let Some((theirs, body)) = peer.inbox.pop_front() else {
                all = false;
                continue;
            };
            peer.backlog = peer.backlog.saturating_sub(body.bytes().len());
            if theirs != *mine {
                let corrupt = FabricError::Corrupt { rank, peer: from };
                let differs =
                    call_of(&theirs).and_then(|theirs| call.mismatch(&theirs, rank, from));
                return Err(differs.unwrap_or(corrupt));
            }
            *message = Some(body);
        }
        Ok(all)
    }

    fn has_unsent(&self) -> bool {
        self.peers.iter().any(|peer| peer.link.as_ref().is_some_and(Link::has_unsent))
    }

    /// Goes on as far as possible, and waits if that is nowhere. Returns false when the deadline has passed.
    fn advance(
        &mut self,
        wait: &mut Wait,
        mine: &[u8; CALL],
        needed: impl Fn(Rank) -> bool,
    ) -> Result<bool, FabricError> {
        if self.pump(needed)? {
            return Ok(true);
        }
        let now = Instant::now();
        let begun = *wait.begun.get_or_insert(now);
        if now < wait.deadline && now - begun < self.spin {
            std::thread::yield_now();
            return Ok(true);
        }
        let news = self.pump(|_| true);
        // Half of its own time and more: not because it was elsewhere itself.
        let is_late = now - begun >= wait.deadline.saturating_duration_since(begun) / 2;
        let has_time = self.check_notices(mine, is_late)?;
        if news? {
            return Ok(true);
        }
        if let Some(rank) = self.dead() {
            return Err(FabricError::Died { rank });
        }
        let now = Instant::now();
        if now >= wait.deadline || !has_time {
            return Ok(false);
        }
        let mut until = wait.deadline;
        if !wait.has_reported && self.rank > 0 {
            until = until.min(begun + STUCK);
            if now >= begun + STUCK {
                wait.has_reported = true;
                let at = Notice::At { number: self.number, call: *mine };
                self.say(0, Head::of_kind(Kind::Notice), &at.bytes());
            }
        }
        self.sleep(left(until));
        Ok(true)
    }

    /// Sleeps until a rank has sent something, or takes something.
    pub(crate) fn sleep(&self, most: Duration) {
        let links = self.peers.iter().filter_map(|peer| Some((peer.link.as_ref()?, peer.reads())));
        sleep_on_links(links, most);
    }

    /// Rank 0 waits for everyone's arrival, then sends everyone the decision.
    fn decide(
        &mut self,
        call: &Call,
        mine: &[u8; CALL],
        wait: &mut Wait,
    ) -> Result<(), FabricError> {
        loop {
            for (peer, arrival) in self.arrivals.iter().enumerate() {
                let Some((number, theirs)) = arrival else { continue };
                if theirs != mine {
                    let corrupt = FabricError::Corrupt { rank: 0, peer };
                    let differs =
                        call_of(theirs).and_then(|theirs| call.mismatch(&theirs, 0, peer));
                    return Err(differs.unwrap_or(corrupt));
                }
                if *number != self.number {
                    return Err(FabricError::Lost { rank: 0, peer });
                }
            }
            let missing: Vec<bool> = self.arrivals.iter().map(Option::is_none).collect();
            let Some(peer) = missing.iter().skip(1).position(|&is| is).map(|at| at + 1) else {
                break;
            };
            if !self.advance(wait, mine, |rank| missing[rank])? {
                let what = "for the end of the call on";
                return Err(FabricError::Deadline { rank: 0, peer, what });
            }
        }
        self.arrivals.fill(None);
        let decision = Head { number: self.number, ..Head::of_kind(Kind::Decision) };
        for peer in 1..self.peers.len() {
            self.say(peer, decision, &[]);
        }
        Ok(())
    }

    /// The other ranks report to rank 0, and wait for its decision.
    fn arrive(&mut self, mine: &[u8; CALL], wait: &mut Wait) -> Result<(), FabricError> {
        let arrival = Head { call: *mine, number: self.number, ..Head::of_kind(Kind::Arrival) };
        self.say(0, arrival, &[]);
        while self.decided <= self.number {
            if !self.advance(wait, mine, |rank| rank == 0)? {
                let (rank, what) = (self.rank, "for the end of the call on");
                return Err(FabricError::Deadline { rank, peer: 0, what });
            }
        }
        Ok(())
    }

    /// Sends and receives, or says why not.
    fn step(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        let mine = call_bytes(call);
        let long = sends.iter().find(|(_, message)| message.bytes().len() > self.longest);
        if let Some((to, message)) = long {
            let (length, limit) = (message.bytes().len(), self.longest);
            let reason = format!("a message of {length} bytes to rank {to}, {limit} are the most");
            return Err(FabricError::Refused { rank: self.rank, reason });
        }
        for (to, message) in sends {
            self.post(*to, &mine, message);
        }
        let mut messages: Vec<Option<Message>> = vec![None; receives.len()];
        let mut wait = Wait::until(deadline);
        loop {
            let all = self.collect(call, &mine, receives, &mut messages)?;
            if all && !self.has_unsent() {
                return Ok(messages.into_iter().flatten().collect());
            }
            if !self.advance(&mut wait, &mine, |rank| receives.contains(&rank))? {
                let missing = messages.iter().position(Option::is_none);
                let (peer, what) = match missing {
                    Some(index) => (receives[index], "to receive from"),
                    None => (self.unsent_to(), "to send to"),
                };
                return Err(FabricError::Deadline { rank: self.rank, peer, what });
            }
        }
    }

    /// The first rank that does not take what is sent to it.
    fn unsent_to(&self) -> Rank {
        let waits = |peer: &Peer| peer.link.as_ref().is_some_and(Link::has_unsent);
        self.peers.iter().position(waits).unwrap_or(self.rank)
    }
}

impl Fabric for TcpFabric {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.peers.len()
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        if let Some(verdict) = self.notices.verdict() {
            return Err(verdict);
        }
        self.step(call, sends, receives, deadline).map_err(|fault| self.fail(fault, None))
    }

    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        if let Some(verdict) = self.notices.verdict() {
            return Err(verdict);
        }
        let (mine, mut wait) = (call_bytes(call), Wait::until(deadline));
        let outcome = match self.rank {
            0 => self.decide(call, &mine, &mut wait),
            _ => self.arrive(&mine, &mut wait),
        };
        if let Err(fault) = outcome {
            self.fail_or_complete(fault)?;
        }
        self.number += 1;
        Ok(())
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.fail(error, None)
    }
}

impl Drop for TcpFabric {
    /// What was said last is to be read: a connection that is closed while something has come over it is reset, and
    /// what was on its way is lost.
    fn drop(&mut self) {
        let until = Instant::now() + LINGER;
        self.discard_messages();
        while self.has_unsent() && !left(until).is_zero() {
            let _ = self.pump(|_| true);
            if self.has_unsent() {
                self.sleep(left(until).min(Duration::from_millis(1)));
            }
        }
        self.peers.iter().filter_map(|peer| peer.link.as_ref()).for_each(Link::finish);
        loop {
            // Whatever comes is of no more use, faults included.
            let _ = self.pump(|_| true);
            let open = self.peers.iter().any(|peer| peer.link.is_some() && !peer.is_dead());
            if !open || left(until).is_zero() {
                return;
            }
            self.sleep(left(until));
        }
    }
}
