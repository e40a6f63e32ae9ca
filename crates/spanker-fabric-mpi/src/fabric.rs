// SPDX-License-Identifier: Apache-2.0
//! The fabric whose ranks are processes: messages, and the end of a call.
//!
//! A message is its head (the call, the message's number and length) with the payload behind it if that is short;
//! long payloads follow as messages of their own, straight from the sender's memory into a receive buffer, which may be part
//! of the receiver's result. A step waits for what it receives. What it sends is complete when the call is: messages do not
//! change, so nobody needs to wait until a peer has read them. How ranks wait is in `wait.rs`, and how they agree on a
//! fault in `fault.rs`.
//!
//! A call is complete when rank 0 says so. It hears from everyone first, so a call that it reports complete
//! is complete everywhere. Only if rank 0 dies between its reports to one rank and the next, which is a microsecond, some ranks report its
//! death for a call that others have completed.

use std::collections::HashSet;
use std::ffi::c_int;
use std::rc::Rc;
use std::time::{Duration, Instant};

use spanker_collective::Rank;
use spanker_fabric::wire::{CALL, HEAD, call_bytes, call_of};
use spanker_fabric::{Call, Fabric, FabricError, Message, Pool, ReceiveBuffer};

use crate::MpiError;
use crate::fault::Notices;
use crate::native::Ready;
use crate::raw::{Comm, Completed, LONGEST, RequestBuffer, Requests};
use crate::wait::Wait;
use crate::world::Life;

/// Messages by what they are. Long payloads have tags from `BODY` on, by the number of their message.
const HEADS: c_int = 1;
pub(crate) const NOTICES: c_int = 2;
const ARRIVALS: c_int = 3;
const DECISIONS: c_int = 4;
const BODY: c_int = 16;
/// Every MPI has tags up to 32767.
const BODIES: u64 = 16384;

/// Payloads up to this travel with their head: both fit what MPIs send without asking the receiver first.
const INLINE: usize = 4000 - HEAD;

/// Messages that may not have been read before their sender waits.
const UNREAD: usize = 256;
/// How long a rank waits for MPI to report that what it sent has been read.
const SETTLING: Duration = Duration::from_millis(100);

/// One rank's end of a group of processes.
///
/// Dropping an end notifies the others that this rank has left: whoever still needs it gets [`FabricError::Died`].
#[derive(Debug)]
pub struct MpiFabric {
    pub(crate) life: Rc<Life>,
    pub(crate) comm: Comm,
    /// Heads and notices.
    pub(crate) pool: Pool,
    /// Long payloads: a pool of their own, so that their memory is reused while it is in the caches.
    bodies: Pool,
    /// What the step that is under way receives.
    pub(crate) receiving: Requests,
    /// What was sent and may not have been read yet.
    sending: Requests,
    pub(crate) completed: Vec<Completed>,
    /// What each request of `receiving` is for.
    roles: Vec<Role>,
    /// The caller's buffers for the step's receives, where it gave one and the receive has not begun.
    receive_buffers: Vec<Option<ReceiveBuffer>>,
    /// Short messages that nobody waits for.
    pub(crate) outgoing: Requests,
    sent: Vec<u64>,
    received: Vec<u64>,
    /// Calls that are complete.
    pub(crate) number: u64,
    pub(crate) notices: Notices,
    /// Calls of MPI's own collectives that all ranks have agreed on.
    pub(crate) agreed: HashSet<[u8; CALL]>,
    /// The last of them.
    pub(crate) ready: Option<Ready>,
    pub(crate) scratch: Vec<u64>,
}

/// What a message that is received is for.
#[derive(Debug, Clone, Copy)]
enum Role {
    /// The head of the step's receive of this index, which is the message of this number from its rank.
    Head(usize, u64),
    /// Its payload, and whether the caller gave the buffer for it.
    Body(usize, bool),
}

impl MpiFabric {
    pub(crate) fn new(life: &Rc<Life>, comm: Comm) -> MpiFabric {
        MpiFabric {
            life: Rc::clone(life),
            comm,
            pool: Pool::default(),
            bodies: Pool::default(),
            receiving: Requests::default(),
            sending: Requests::default(),
            completed: Vec::new(),
            roles: Vec::new(),
            receive_buffers: Vec::new(),
            outgoing: Requests::default(),
            sent: vec![0; life.ranks],
            received: vec![0; life.ranks],
            number: 0,
            notices: Notices::new(life.ranks),
            agreed: HashSet::new(),
            ready: None,
            scratch: Vec::new(),
        }
    }

    /// What MPI said, as a fault of the group.
    pub(crate) fn failed(&mut self, error: &MpiError) -> FabricError {
        let (rank, reason) = (self.life.rank, error.to_string());
        // An error may be how MPI puts that somebody is dead.
        match self.dead() {
            Some(rank) => FabricError::Died { rank },
            None => FabricError::Failed { rank, reason },
        }
    }

    /// Gives up the step: nobody will wait for its messages.
    fn give_up(&mut self, fault: FabricError) -> FabricError {
        let fault = self.fail(fault, None);
        self.receiving.abandon();
        self.sending.abandon();
        self.receive_buffers.clear();
        fault
    }

    fn begin(
        &mut self,
        call: &[u8; CALL],
        sends: &[(Rank, Message)],
        receives: &[Rank],
    ) -> Result<(), MpiError> {
        self.receiving.clear();
        self.roles.clear();
        // Receives are posted before sends, so that MPI can write what arrives directly to its buffer.
        for (index, &from) in receives.iter().enumerate() {
            let buffer = self.pool.receive_buffer(HEAD + INLINE);
            self.receiving.receive(self.comm, from, HEADS, buffer)?;
            // MPI matches messages in order, but need not report their completion in order.
            self.roles.push(Role::Head(index, self.received[from]));
            self.received[from] += 1;
        }
        for (to, message) in sends {
            let (bytes, number) = (message.bytes(), self.sent[*to]);
            self.sent[*to] += 1;
            let inline = if bytes.len() <= INLINE { bytes } else { &[] };
            let head = self.pool.write(HEAD + inline.len(), |out| {
                out[..CALL].copy_from_slice(call);
                out[CALL..CALL + 8].copy_from_slice(&number.to_le_bytes());
                out[CALL + 8..HEAD].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
                out[HEAD..].copy_from_slice(inline);
            });
            self.sending.send(self.comm, *to, HEADS, head)?;
            if bytes.len() > INLINE {
                let tag = BODY + (number % BODIES) as c_int;
                self.sending.send(self.comm, *to, tag, message.clone())?;
            }
        }
        Ok(())
    }

    /// Reads the head of a message. Returns the message if the payload came with the head, or else receives that.
    fn open(
        &mut self,
        call: &Call,
        mine: &[u8; CALL],
        (peer, expected): (Rank, u64),
        head: Completed,
        index: usize,
    ) -> Result<Option<Message>, FabricError> {
        let rank = self.life.rank;
        let (_, RequestBuffer::Received(buffer), count) = head else { return Ok(None) };
        let message = self.pool.freeze(buffer);
        let corrupt = FabricError::Corrupt { rank, peer };
        let Some((head, inline)) = message.bytes()[..count].split_at_checked(HEAD) else {
            return Err(corrupt);
        };
        let long = |at: usize| head[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
        let theirs: [u8; CALL] = head[..CALL].try_into().map_err(|_| corrupt.clone())?;
        if theirs != *mine {
            let theirs = call_of(&theirs).ok_or_else(|| corrupt.clone())?;
            return Err(call.mismatch(&theirs, rank, peer).unwrap_or(corrupt));
        }
        let (number, len) = (long(CALL), usize::try_from(long(CALL + 8)).unwrap_or(usize::MAX));
        if number != expected {
            return Err(FabricError::Lost { rank, peer });
        }
        let given = self.receive_buffers.get_mut(index).and_then(Option::take);
        if let Some(expected) = given.as_ref().map(ReceiveBuffer::size).filter(|&size| size != len)
        {
            return Err(FabricError::Length { rank, peer, expected, actual: len });
        }
        match (len, given) {
            (_, Some(mut given)) if len == inline.len() => {
                given.bytes_mut().copy_from_slice(inline);
                Ok(Some(given.freeze()))
            }
            (_, None) if len == inline.len() => Ok(Some(message.part(HEAD..HEAD + len))),
            (INLINE..=LONGEST, given) => {
                let is_given = given.is_some();
                let buffer = given.unwrap_or_else(|| self.bodies.receive_buffer(len));
                let tag = BODY + (number % BODIES) as c_int;
                let posted = self.receiving.receive(self.comm, peer, tag, buffer);
                posted.map_err(|error| self.failed(&error))?;
                self.roles.push(Role::Body(index, is_given));
                Ok(None)
            }
            _ => Err(corrupt),
        }
    }

    /// Processes what has arrived since the last poll. Returns whether something has.
    fn receive(
        &mut self,
        call: &Call,
        mine: &[u8; CALL],
        receives: &[Rank],
        messages: &mut [Option<Message>],
    ) -> Result<bool, FabricError> {
        let mut completed = std::mem::take(&mut self.completed);
        let polled = self.receiving.poll(&mut completed);
        let news = !completed.is_empty();
        let mut outcome = Ok(());
        for message in completed.drain(..) {
            match self.roles[message.0] {
                Role::Head(index, number) if outcome.is_ok() => {
                    match self.open(call, mine, (receives[index], number), message, index) {
                        Ok(message) => messages[index] = message,
                        Err(fault) => outcome = Err(fault),
                    }
                }
                Role::Body(index, is_given) => {
                    let (_, buffer, count) = message;
                    let RequestBuffer::Received(mut buffer) = buffer else { continue };
                    let (rank, peer, expected) =
                        (self.life.rank, receives[index], buffer.bytes_mut().len());
                    let message =
                        if is_given { buffer.freeze() } else { self.bodies.freeze(buffer) };
                    messages[index] = Some(message);
                    if count != expected {
                        outcome = Err(FabricError::Length { rank, peer, expected, actual: count });
                    }
                }
                Role::Head(..) => {}
            }
        }
        self.completed = completed;
        polled.map_err(|error| self.failed(&error))?;
        outcome.map(|()| news)
    }

    /// Frees the messages that have been read. Returns whether some have.
    fn push_sending(&mut self) -> Result<bool, FabricError> {
        let mut completed = std::mem::take(&mut self.completed);
        let polled = self.sending.poll(&mut completed);
        let news = !completed.is_empty();
        completed.clear();
        self.completed = completed;
        if self.sending.left() == 0 {
            self.sending.clear();
        }
        polled.map_err(|error| self.failed(&error))?;
        Ok(news)
    }

    /// Waits until MPI reports that this rank's messages of a complete call have been read, which they have.
    fn notice_what_was_read(&mut self) {
        let begun = Instant::now();
        while self.sending.left() > 0 && begun.elapsed() < SETTLING {
            // An error here is one of the next call.
            if !matches!(self.push_sending(), Ok(true)) {
                std::thread::yield_now();
            }
        }
    }

    /// Whom the step waits for, and how.
    fn missing(&self, receives: &[Rank], messages: &[Option<Message>]) -> (Rank, &'static str) {
        match messages.iter().position(Option::is_none) {
            Some(index) => (receives[index], "to receive from"),
            None => (self.sending.first_left().unwrap_or(self.life.rank), "to send to"),
        }
    }

    /// Sends and receives, into the caller's buffers where it gave any.
    fn step(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        if let Some(verdict) = self.notices.verdict() {
            return Err(verdict);
        }
        let mine = call_bytes(call);
        if let Some((to, message)) =
            sends.iter().find(|(_, message)| message.bytes().len() > LONGEST)
        {
            let len = message.bytes().len();
            let reason = format!("a message of {len} bytes to rank {to}: MPI counts to {LONGEST}");
            return Err(self.fail(FabricError::Refused { rank: self.life.rank, reason }, None));
        }
        if let Err(error) = self.begin(&mine, sends, receives) {
            let fault = self.failed(&error);
            return Err(self.give_up(fault));
        }
        let mut messages: Vec<Option<Message>> = vec![None; receives.len()];
        let mut wait = Wait::until(deadline);
        // A rank that sends much without ever receiving waits for its readers, and reads meanwhile.
        let has_backlog = self.sending.count() > UNREAD;
        while self.receiving.left() > 0 || (has_backlog && self.sending.left() > 0) {
            let received = self.receive(call, &mine, receives, &mut messages);
            let outcome =
                match received.and_then(|news| Ok(news | (has_backlog && self.push_sending()?))) {
                    Ok(false) => self.idle(&mut wait, &mine),
                    other => other,
                };
            match outcome {
                Ok(true) => {}
                Ok(false) => {
                    let (peer, what) = self.missing(receives, &messages);
                    let fault = FabricError::Deadline { rank: self.life.rank, peer, what };
                    return Err(self.give_up(fault));
                }
                Err(fault) => return Err(self.give_up(fault)),
            }
        }
        Ok(messages.into_iter().flatten().collect())
    }

    /// Rank 0 waits for everyone's arrival, then sends everyone the decision.
    fn decide(
        &mut self,
        call: &Call,
        mine: &[u8; CALL],
        wait: &mut Wait,
    ) -> Result<(), FabricError> {
        let ranks = self.life.ranks;
        self.receiving.clear();
        for peer in 1..ranks {
            let buffer = self.pool.receive_buffer(CALL + 8);
            let posted = self.receiving.receive(self.comm, peer, ARRIVALS, buffer);
            posted.map_err(|error| self.failed(&error))?;
        }
        while self.receiving.left() > 0 {
            let mut arrived = Vec::new();
            let polled = self.receiving.poll(&mut arrived);
            polled.map_err(|error| self.failed(&error))?;
            if arrived.is_empty() && !self.idle(wait, mine)? {
                let peer =
                    (1..ranks).find(|peer| !self.receiving.is_complete(peer - 1)).unwrap_or(0);
                let what = "for the end of the call on";
                return Err(FabricError::Deadline { rank: 0, peer, what });
            }
            for (index, buffer, count) in arrived {
                let RequestBuffer::Received(buffer) = buffer else { continue };
                let message = self.pool.freeze(buffer);
                self.hear(call, mine, index + 1, &message.bytes()[..count])?;
            }
        }
        let decision = self.pool.write(8, |out| out.copy_from_slice(&self.number.to_le_bytes()));
        for peer in 1..ranks {
            let sent = self.outgoing.send(self.comm, peer, DECISIONS, decision.clone());
            sent.map_err(|error| self.failed(&error))?;
        }
        self.push_outgoing();
        Ok(())
    }

    /// Compares what a rank says that it has completed.
    fn hear(
        &self,
        call: &Call,
        mine: &[u8; CALL],
        peer: Rank,
        arrival: &[u8],
    ) -> Result<(), FabricError> {
        let corrupt = FabricError::Corrupt { rank: 0, peer };
        let Some((number, theirs)) = arrival.split_first_chunk::<8>() else { return Err(corrupt) };
        if theirs != mine {
            let theirs = theirs.try_into().ok().and_then(call_of).ok_or_else(|| corrupt.clone())?;
            return Err(call.mismatch(&theirs, 0, peer).unwrap_or(corrupt));
        }
        if u64::from_le_bytes(*number) != self.number {
            return Err(FabricError::Lost { rank: 0, peer });
        }
        Ok(())
    }

    /// The other ranks report to rank 0, and wait for its decision.
    fn arrive(&mut self, mine: &[u8; CALL], wait: &mut Wait) -> Result<(), FabricError> {
        self.receiving.clear();
        let arrival = self.pool.write(CALL + 8, |out| {
            out[..8].copy_from_slice(&self.number.to_le_bytes());
            out[8..].copy_from_slice(mine);
        });
        let buffer = self.pool.receive_buffer(8);
        let posted = self
            .receiving
            .receive(self.comm, 0, DECISIONS, buffer)
            .and_then(|_| self.receiving.send(self.comm, 0, ARRIVALS, arrival));
        posted.map_err(|error| self.failed(&error))?;
        while !self.decided()? {
            if !self.idle(wait, mine)? {
                let (rank, what) = (self.life.rank, "for the end of the call on");
                return Err(FabricError::Deadline { rank, peer: 0, what });
            }
        }
        Ok(())
    }

    /// Whether rank 0 has said that the call is complete.
    pub(crate) fn decided(&mut self) -> Result<bool, FabricError> {
        let mut completed = std::mem::take(&mut self.completed);
        let polled = self.receiving.poll(&mut completed);
        for (_, buffer, _) in completed.drain(..) {
            if let RequestBuffer::Received(buffer) = buffer {
                drop(self.pool.freeze(buffer));
            }
        }
        self.completed = completed;
        polled.map_err(|error| self.failed(&error))?;
        Ok(self.receiving.left() == 0)
    }

    /// Frees short messages that have been sent.
    pub(crate) fn push_outgoing(&mut self) {
        let mut completed = Vec::new();
        // A receiver may be gone, which is found out elsewhere.
        let _ = self.outgoing.poll(&mut completed);
        if self.outgoing.left() == 0 {
            self.outgoing.clear();
        }
    }
}

impl Fabric for MpiFabric {
    fn rank(&self) -> Rank {
        self.life.rank
    }

    fn ranks(&self) -> usize {
        self.life.ranks
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        self.receive_buffers.clear();
        self.step(call, sends, receives, deadline)
    }

    fn receives_in_place(&self, bytes: usize) -> bool {
        bytes > INLINE
    }

    fn exchange_into(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: Vec<(Rank, Option<ReceiveBuffer>)>,
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        let from: Vec<Rank> = receives.iter().map(|(from, _)| *from).collect();
        self.receive_buffers.clear();
        self.receive_buffers.extend(receives.into_iter().map(|(_, buffer)| buffer));
        self.step(call, sends, &from, deadline)
    }

    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        if let Some(verdict) = self.notices.verdict() {
            return Err(verdict);
        }
        let (mine, mut wait) = (call_bytes(call), Wait::until(deadline));
        let outcome = match self.life.rank {
            0 => self.decide(call, &mine, &mut wait),
            _ => self.arrive(&mine, &mut wait),
        };
        let outcome = match outcome {
            Ok(()) => Ok(()),
            Err(fault) => self.fail_or_complete(fault),
        };
        match outcome {
            Ok(()) => {
                self.number += 1;
                self.notice_what_was_read();
            }
            Err(_) => {
                self.receiving.abandon();
                self.sending.abandon();
            }
        }
        outcome
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.fail(error, None)
    }
}

impl Drop for MpiFabric {
    fn drop(&mut self) {
        self.announce_leaving();
    }
}
