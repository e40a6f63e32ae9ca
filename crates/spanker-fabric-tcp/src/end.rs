// SPDX-License-Identifier: Apache-2.0
//! What one rank has of a group: its connections, what has come over them, and how a call goes on and ends.
//!
//! While a rank is in a call everything moves there, and nobody else touches this. A step is complete when what it sends is
//! with the system and what it receives has come. While a rank waits it reads from all others, whether it needs them or
//! not, so that nobody waits for a reader that waits itself. Between calls the thread of `fabric.rs` reads.
//!
//! A call is complete when rank 0 says so. It hears from everyone first, so a call that it reports complete is complete
//! everywhere. Only if rank 0 dies between its reports to one rank and the next some ranks report its death for a call
//! that others have completed.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use spanker_collective::Rank;
use spanker_fabric::wire::{CALL, Notice, call_bytes, call_of};
use spanker_fabric::{Call, FabricError, Message};

use crate::Options;
use crate::fault::Notices;
use crate::frame::{Head, Kind};
use crate::link::{Closed, Frame, Link};
use crate::wait::{left, sleep_on_links};

/// Bytes that may have come from a rank before this one asks for them. After that its sender waits.
const BACKLOG: usize = 64 << 20;
/// What a message counts for besides its bytes, so that empty ones are no more without end than long ones.
const EACH: usize = 16 << 10;
/// Frames of a rank that are read before the others have their turn, and the clock.
const MOST_FRAMES: usize = 256;
/// Heartbeats within the timeout of a group, and how far they are apart at the least and at the most.
const BEATS: u32 = 10;
const BEAT_MIN: Duration = Duration::from_millis(10);
const BEAT_MAX: Duration = Duration::from_secs(1);
/// A rank that waits asks without sleeping for at most so long, if such waits were worth it before.
const SPIN_MAX: Duration = Duration::from_millis(1);
/// After this, a rank reports to rank 0 which call it is waiting in.
const STUCK: Duration = Duration::from_millis(10);
/// How long an end that is dropped waits for the others to read what it said last.
const LINGER: Duration = Duration::from_millis(100);

/// One rank's end of a group.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) rank: Rank,
    pub(crate) peers: Vec<Peer>,
    /// Calls that are complete.
    pub(crate) number: u64,
    /// Calls that rank 0 has said to be complete.
    pub(crate) decided: u64,
    /// On rank 0: what each rank has done its part of.
    arrivals: Vec<Option<(u64, [u8; CALL])>>,
    pub(crate) notices: Notices,
    /// A fault that was found between two calls.
    found: Option<FabricError>,
    /// How long a rank that waits asks without sleeping, at the least, and at present.
    spin_least: Duration,
    spin: Duration,
    longest: usize,
    timeout: Duration,
    next_heartbeat: Instant,
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
    /// When something came from it, to the last heartbeat.
    last_heard: Instant,
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

    fn keep(&mut self, call: [u8; CALL], body: Message) {
        self.backlog += body.bytes().len() + EACH;
        self.inbox.push_back((call, body));
    }

    fn take(&mut self) -> Option<([u8; CALL], Message)> {
        let (call, body) = self.inbox.pop_front()?;
        self.backlog = self.backlog.saturating_sub(body.bytes().len() + EACH);
        Some((call, body))
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

impl End {
    /// The end of `rank`, with its connections to all ranks.
    pub(crate) fn new(rank: Rank, links: Vec<Option<Link>>, options: &Options) -> End {
        let (ranks, now) = (links.len(), Instant::now());
        let peer = |mut link: Option<Link>| {
            if let Some(link) = &mut link {
                link.set_limit(options.longest_message as u64);
                // Heartbeats say who is there. What the kernel cannot deliver says less: a rank that computes and does
                // not read takes nothing either. A system without this setting gives up as late.
                let _ = link.set_timeout(None);
            }
            let (inbox, last_heard) = (VecDeque::new(), now);
            Peer { link, inbox, backlog: 0, sent: 0, received: 0, last_heard }
        };
        End {
            rank,
            peers: links.into_iter().map(peer).collect(),
            number: 0,
            decided: 0,
            arrivals: vec![None; ranks],
            notices: Notices::new(ranks),
            found: None,
            spin_least: options.spin,
            spin: options.spin,
            longest: options.longest_message,
            timeout: options.timeout,
            next_heartbeat: now,
        }
    }

    /// How far heartbeats are apart.
    pub(crate) fn interval(&self) -> Duration {
        (self.timeout / BEATS).clamp(BEAT_MIN, BEAT_MAX)
    }

    /// Shows the others that this process is there, and gives up those of which nothing has come for the timeout. What
    /// has come has been read.
    fn heartbeat(&mut self) {
        let (now, interval) = (Instant::now(), self.interval());
        self.next_heartbeat = now + interval;
        // What was heard is noted up to an interval late, and this is looked at up to another one late.
        let most = self.timeout.saturating_sub(2 * interval).max(2 * interval);
        for peer in &mut self.peers {
            let reads = peer.reads();
            let Some(link) = peer.link.as_mut().filter(|link| link.closed().is_none()) else {
                continue;
            };
            if !link.take_written() && !link.has_unsent() {
                link.push(Head::of_kind(Kind::Heartbeat), None);
                link.flush();
                link.take_written();
            }
            // Of a rank whose messages are not read there is always something to hear.
            if link.take_heard() || !reads {
                peer.last_heard = now;
            } else if now.saturating_duration_since(peer.last_heard) >= most {
                link.give_up(format!("nothing was heard of it for {} ms", most.as_millis()));
            }
        }
    }

    /// What is done between two calls: reads what has come, so that it is not the kernel that has to keep it, and shows
    /// the others that this process is there. How long until it is to be done again.
    pub(crate) fn tick(&mut self) -> Duration {
        let now = Instant::now();
        if now < self.next_heartbeat {
            return self.next_heartbeat - now;
        }
        if let Err(fault) = self.pump(|_| true) {
            self.found.get_or_insert(fault);
        }
        self.interval()
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

    /// Reads what has come from a rank. Returns whether a call may go on with it.
    fn read(&mut self, from: Rank) -> Result<bool, FabricError> {
        let mut news = false;
        if let Some(link) = &mut self.peers[from].link {
            link.look_again();
        }
        for _ in 0..MOST_FRAMES {
            let peer = &mut self.peers[from];
            let reads = peer.reads();
            let Some(link) = peer.link.as_mut().filter(|_| reads) else {
                return Ok(news);
            };
            match link.next_frame() {
                Ok(Some(frame)) => news |= self.sort(from, frame)?,
                Ok(None) => return Ok(news),
                Err(why) => return self.closed(from, &why).map_or(Ok(news), Err),
            }
        }
        Ok(news)
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

    /// Puts a frame where it belongs. Returns whether a call may go on with it: what says nothing new does not keep
    /// anybody from its deadline.
    fn sort(&mut self, from: Rank, frame: Frame) -> Result<bool, FabricError> {
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
                    peer.keep(head.call, body);
                }
                Ok(true)
            }
            Kind::Arrival if rank == 0 => {
                let before = self.arrivals[from].replace((head.number, head.call));
                Ok(before.is_none())
            }
            Kind::Decision if from == 0 => {
                let decided = head.number.saturating_add(1).max(self.decided);
                Ok(std::mem::replace(&mut self.decided, decided) < decided)
            }
            // Whoever waits looks at what it was notified of before it sleeps.
            Kind::Notice => match Notice::of(body.bytes()) {
                Some(notice) => {
                    self.hear(from, notice);
                    Ok(false)
                }
                None => Err(FabricError::Corrupt { rank, peer: from }),
            },
            Kind::Heartbeat => Ok(false),
            _ => Err(FabricError::Corrupt { rank, peer: from }),
        }
    }

    /// Writes and reads what can be, with all ranks or those that are `needed`. Returns whether anything has come. All
    /// are read before a fault of one counts, because one may have said what the group's fault is.
    pub(crate) fn pump(&mut self, needed: impl Fn(Rank) -> bool) -> Result<bool, FabricError> {
        let (mut news, mut fault) = (false, None);
        let is_due = Instant::now() >= self.next_heartbeat;
        for rank in 0..self.peers.len() {
            if let Some(link) = self.peers[rank].link.as_mut().filter(|link| link.has_unsent()) {
                news |= link.flush();
            }
            if needed(rank) || is_due {
                match self.read(rank) {
                    Ok(read) => news |= read,
                    Err(found) => fault = fault.or(Some(found)),
                }
            }
        }
        if is_due {
            self.heartbeat();
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
            let Some((theirs, body)) = peer.take() else {
                all = false;
                continue;
            };
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

    /// Sleeps until a rank has sent something, takes something, or this one is to send a heartbeat.
    pub(crate) fn sleep(&self, most: Duration) {
        let most = most.min(left(self.next_heartbeat));
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
                self.learn(wait.begun.map(|begun| begun.elapsed()));
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

    /// Learns from a wait how long to ask without sleeping: twice as long as waits take that are short. Being woken takes as
    /// long as a message, and what is asked for in vain costs a core that may have better to do.
    fn learn(&mut self, waited: Option<Duration>) {
        let Some(waited) = waited.filter(|_| !self.spin_least.is_zero()) else { return };
        let wanted = if waited > SPIN_MAX { Duration::ZERO } else { 2 * waited };
        // Slowly down: one long wait among many short ones is that of a rank that was held up.
        let kept = self.spin - self.spin / 8;
        self.spin = wanted.max(kept).clamp(self.spin_least, SPIN_MAX.max(self.spin_least));
    }

    /// The first rank that does not take what is sent to it.
    fn unsent_to(&self) -> Rank {
        let waits = |peer: &Peer| peer.link.as_ref().is_some_and(Link::has_unsent);
        self.peers.iter().position(waits).unwrap_or(self.rank)
    }

    /// What is found to be the group's fault before a call begins.
    fn begin(&mut self) -> Result<(), FabricError> {
        if let Some(verdict) = self.notices.verdict() {
            return Err(verdict);
        }
        match self.found.take() {
            Some(fault) => Err(self.fail(fault, None)),
            None => Ok(()),
        }
    }

    /// [`spanker_fabric::Fabric::exchange`].
    pub(crate) fn exchange(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        self.begin()?;
        self.step(call, sends, receives, deadline).map_err(|fault| self.fail(fault, None))
    }

    /// [`spanker_fabric::Fabric::commit`].
    pub(crate) fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        self.begin()?;
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

    /// Leaves the group. What was said last is to be read: a connection that is closed while something has come over it
    /// is reset, and what was on its way is lost.
    pub(crate) fn leave(&mut self) {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::channel::{Intent, dial};
    use crate::{Id, Limits, Listener};

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    /// An end, and the connection of a rank that has the key and does what the test wants. The end is `rank` of three.
    fn end_and(hostile: Rank, rank: Rank) -> (End, Link, Listener) {
        let listener = Listener::bind("127.0.0.1:0", None, Limits::USUAL).expect("a port");
        let (id, from) = (Id([5; 16]), 2);
        let link = dial(listener.address(), None, Intent::Mesh(id, from), soon()).expect("a way");
        let (_, own) = listener.next_of(id, 1, soon()).expect("a connection");
        let mut links = vec![None, None, None];
        links[hostile] = Some(own);
        let options = Options { timeout: Duration::from_secs(60), ..Options::new("1") };
        (End::new(rank, links, &options), link, listener)
    }

    #[test]
    fn empty_messages_that_nobody_asks_for_are_not_kept_without_end() {
        let (mut end, mut link, _listener) = end_and(2, 0);
        let most = BACKLOG / EACH + 1;
        let mut number = 0;
        while number < 2 * most as u64 {
            for _ in 0..1000 {
                link.push(Head { number, ..Head::of_kind(Kind::Message) }, None);
                number += 1;
            }
            link.flush();
            for _ in 0..8 {
                end.pump(|_| true).expect("nothing is wrong with them");
            }
        }
        assert!(end.peers[2].inbox.len() <= most, "{}", end.peers[2].inbox.len());
        // The first ones are those that are kept, and taking some makes place for others.
        for _ in 0..most {
            end.peers[2].take().expect("a message");
        }
        assert_eq!(end.peers[2].backlog, 0);
        assert_eq!(end.pump(|_| true), Ok(true));
    }

    #[test]
    fn notices_without_end_do_not_keep_a_rank_from_its_deadline() {
        let (mut end, mut link, _listener) = end_and(2, 0);
        let is_over = AtomicBool::new(false);
        let elsewhere = Notice::At { number: 7, call: [0; CALL] }.bytes();
        std::thread::scope(|scope| {
            let is_over = &is_over;
            scope.spawn(move || {
                let until = Instant::now() + Duration::from_secs(20);
                while !is_over.load(Ordering::Relaxed) && Instant::now() < until {
                    for _ in 0..100 {
                        link.push_bytes(Head::of_kind(Kind::Notice), &elsewhere);
                        link.push(Head::of_kind(Kind::Heartbeat), None);
                        link.push(Head::of_kind(Kind::Arrival), None);
                    }
                    while !link.flush() && !is_over.load(Ordering::Relaxed) {
                        std::thread::yield_now();
                    }
                }
            });
            let deadline = Instant::now() + Duration::from_millis(100);
            let fault = end.exchange(&Call::BARRIER, &[], &[2], deadline).map(|_| ());
            is_over.store(true, Ordering::Relaxed);
            let expected = FabricError::Deadline { rank: 0, peer: 2, what: "to receive from" };
            assert_eq!(fault, Err(expected), "not its end, which is twenty seconds later");
        });
    }

    #[test]
    fn what_only_the_leader_decides_and_long_notices_are_corrupt_from_others() {
        let decision = Head::of_kind(Kind::Decision);
        for (head, bytes) in [(decision, 0), (Head::of_kind(Kind::Notice), 5000), (decision, 1)] {
            let (mut end, mut link, _listener) = end_and(2, 1);
            link.push_bytes(head, &vec![3; bytes]);
            link.flush();
            let until = soon();
            let fault = loop {
                if let Err(fault) = end.pump(|_| true) {
                    break fault;
                }
                assert!(Instant::now() < until, "{head:?} was taken");
            };
            assert_eq!(fault, FabricError::Corrupt { rank: 1, peer: 2 }, "{head:?}, {bytes}");
        }
    }

    #[test]
    fn short_waits_are_spent_awake_and_long_ones_asleep() {
        let (mut end, _link, _listener) = end_and(2, 0);
        let waited = |micros| Some(Duration::from_micros(micros));
        let least = end.spin;
        end.learn(None);
        assert_eq!(end.spin, least, "nothing was waited for");
        end.learn(waited(200));
        assert!(end.spin >= Duration::from_micros(400) && end.spin <= SPIN_MAX);
        for _ in 0..100 {
            end.learn(waited(1_000_000));
        }
        assert_eq!(end.spin, least);
        // Who asked for none gets none.
        (end.spin, end.spin_least) = (Duration::ZERO, Duration::ZERO);
        end.learn(waited(200));
        assert_eq!(end.spin, Duration::ZERO);
    }

    #[test]
    fn a_fault_that_is_found_between_two_calls_is_the_next_calls() {
        let (mut end, mut link, _listener) = end_and(2, 0);
        link.push(Head { number: 9, ..Head::of_kind(Kind::Message) }, None);
        link.flush();
        let until = soon();
        while end.found.is_none() && Instant::now() < until {
            end.next_heartbeat = Instant::now();
            end.tick();
        }
        let fault = end.exchange(&Call::BARRIER, &[], &[], soon()).map(|_| ());
        assert_eq!(fault, Err(FabricError::Lost { rank: 0, peer: 2 }));
    }
}
