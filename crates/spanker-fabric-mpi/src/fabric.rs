// SPDX-License-Identifier: Apache-2.0
//! The fabric whose ranks are processes: messages, and the end of a call.
//!
//! A message is its head (the call, the message's number and length) with the payload behind it if that is short;
//! long payloads follow as messages of their own, straight from the sender's letter into the receiver's, or to where
//! the receiver's result will be. A step
//! waits for what it receives. What it sends is complete when the call is: letters do not change, so nobody needs
//! to wait until a peer has got round to reading them. How ranks wait is in `wait.rs`, and how they agree on a
//! fault in `fault.rs`.
//!
//! A call is complete when rank 0 says so. It hears from everyone first; so either nobody is told that the call is
//! complete, or all parts of it are. Only if rank 0 dies between telling one rank and telling the next, which is
//! a microsecond, some ranks report its death for a call that others have completed.

use std::collections::HashSet;
use std::ffi::c_int;
use std::rc::Rc;
use std::time::{Duration, Instant};

use spanker_collective::Rank;
use spanker_fabric::{Call, Draft, Fabric, FabricError, Letter, Pool};

use crate::MpiError;
use crate::fault::Notices;
use crate::native::Ready;
use crate::raw::{Cargo, Comm, Flight, LONGEST, Landed};
use crate::wait::Wait;
use crate::wire::{CALL, HEAD, call_bytes, call_of};
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
/// How long a rank waits to be told that what it sent has been read.
const SETTLING: Duration = Duration::from_millis(100);

/// One rank's end of a group of processes.
///
/// Dropping an end tells the others that this rank has left: whoever still needs it gets [`FabricError::Died`].
#[derive(Debug)]
pub struct MpiFabric {
    pub(crate) life: Rc<Life>,
    pub(crate) comm: Comm,
    /// Heads and notices.
    pub(crate) pool: Pool,
    /// Long payloads: apart, so that their memory is used again while it is in the caches.
    bodies: Pool,
    /// What the step that is under way receives.
    pub(crate) flight: Flight,
    /// What was sent and may not have been read yet.
    sending: Flight,
    pub(crate) landed: Vec<Landed>,
    /// What the message at each place of the flight is.
    roles: Vec<Role>,
    /// Where the step's receives are to be written, for those that say so and have not begun.
    places: Vec<Option<Draft>>,
    /// Short messages that nobody waits for.
    pub(crate) outgoing: Flight,
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
    /// Its payload, and whether that is in its place.
    Body(usize, bool),
}

impl MpiFabric {
    pub(crate) fn new(life: &Rc<Life>, comm: Comm) -> MpiFabric {
        MpiFabric {
            life: Rc::clone(life),
            comm,
            pool: Pool::default(),
            bodies: Pool::default(),
            flight: Flight::default(),
            sending: Flight::default(),
            landed: Vec::new(),
            roles: Vec::new(),
            places: Vec::new(),
            outgoing: Flight::default(),
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

    /// Gives the step up: nobody will wait for its messages.
    fn give_up(&mut self, fault: FabricError) -> FabricError {
        let fault = self.fail(fault, None);
        self.flight.abandon();
        self.sending.abandon();
        self.places.clear();
        fault
    }

    fn begin(
        &mut self,
        call: &[u8; CALL],
        sends: &[(Rank, Letter)],
        receives: &[Rank],
    ) -> Result<(), MpiError> {
        self.flight.clear();
        self.roles.clear();
        // What is received first can be written where it belongs at once.
        for (index, &from) in receives.iter().enumerate() {
            let draft = self.pool.draft(HEAD + INLINE);
            self.flight.receive(self.comm, from, HEADS, draft)?;
            // MPI matches in order, and need not say so in order that they are complete.
            self.roles.push(Role::Head(index, self.received[from]));
            self.received[from] += 1;
        }
        for (to, letter) in sends {
            let (bytes, number) = (letter.bytes(), self.sent[*to]);
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
                self.sending.send(self.comm, *to, tag, letter.clone())?;
            }
        }
        Ok(())
    }

    /// Reads the head of a message. Returns the letter if it came along, or else asks for it.
    fn open(
        &mut self,
        call: &Call,
        mine: &[u8; CALL],
        (peer, expected): (Rank, u64),
        head: Landed,
        index: usize,
    ) -> Result<Option<Letter>, FabricError> {
        let rank = self.life.rank;
        let (_, Cargo::Received(draft), count) = head else { return Ok(None) };
        let letter = self.pool.seal(draft);
        let corrupt = FabricError::Corrupt { rank, peer };
        let Some((head, inline)) = letter.bytes()[..count].split_at_checked(HEAD) else {
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
        let place = self.places.get_mut(index).and_then(Option::take);
        if let Some(expected) = place.as_ref().map(Draft::size).filter(|&size| size != len) {
            return Err(FabricError::Length { rank, peer, expected, actual: len });
        }
        match (len, place) {
            (_, Some(mut place)) if len == inline.len() => {
                place.bytes_mut().copy_from_slice(inline);
                Ok(Some(place.seal()))
            }
            (_, None) if len == inline.len() => Ok(Some(letter.part(HEAD..HEAD + len))),
            (INLINE..=LONGEST, place) => {
                let is_placed = place.is_some();
                let draft = place.unwrap_or_else(|| self.bodies.draft(len));
                let tag = BODY + (number % BODIES) as c_int;
                let posted = self.flight.receive(self.comm, peer, tag, draft);
                posted.map_err(|error| self.failed(&error))?;
                self.roles.push(Role::Body(index, is_placed));
                Ok(None)
            }
            _ => Err(corrupt),
        }
    }

    /// Takes what has come since the last look. Returns whether something has.
    fn take(
        &mut self,
        call: &Call,
        mine: &[u8; CALL],
        receives: &[Rank],
        letters: &mut [Option<Letter>],
    ) -> Result<bool, FabricError> {
        let mut landed = std::mem::take(&mut self.landed);
        let polled = self.flight.poll(&mut landed);
        let news = !landed.is_empty();
        let mut outcome = Ok(());
        for message in landed.drain(..) {
            match self.roles[message.0] {
                Role::Head(index, number) if outcome.is_ok() => {
                    match self.open(call, mine, (receives[index], number), message, index) {
                        Ok(letter) => letters[index] = letter,
                        Err(fault) => outcome = Err(fault),
                    }
                }
                Role::Body(index, is_placed) => {
                    let (_, cargo, count) = message;
                    let Cargo::Received(mut draft) = cargo else { continue };
                    let (rank, peer, expected) =
                        (self.life.rank, receives[index], draft.bytes_mut().len());
                    let letter = if is_placed { draft.seal() } else { self.bodies.seal(draft) };
                    letters[index] = Some(letter);
                    if count != expected {
                        outcome = Err(FabricError::Length { rank, peer, expected, actual: count });
                    }
                }
                Role::Head(..) => {}
            }
        }
        self.landed = landed;
        polled.map_err(|error| self.failed(&error))?;
        outcome.map(|()| news)
    }

    /// Lets go of what has been read. Returns whether something has.
    fn push_sending(&mut self) -> Result<bool, FabricError> {
        let mut landed = std::mem::take(&mut self.landed);
        let polled = self.sending.poll(&mut landed);
        let news = !landed.is_empty();
        landed.clear();
        self.landed = landed;
        if self.sending.left() == 0 {
            self.sending.clear();
        }
        polled.map_err(|error| self.failed(&error))?;
        Ok(news)
    }

    /// What this rank sent in a call that is complete has been read: only this rank has to notice.
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
    fn missing(&self, receives: &[Rank], letters: &[Option<Letter>]) -> (Rank, &'static str) {
        match letters.iter().position(Option::is_none) {
            Some(index) => (receives[index], "to receive from"),
            None => (self.sending.first_left().unwrap_or(self.life.rank), "to send to"),
        }
    }

    /// Sends and receives; what has a place is written there.
    fn step(
        &mut self,
        call: &Call,
        sends: &[(Rank, Letter)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Letter>, FabricError> {
        if let Some(verdict) = self.notices.verdict() {
            return Err(verdict);
        }
        let mine = call_bytes(call);
        if let Some((to, letter)) = sends.iter().find(|(_, letter)| letter.bytes().len() > LONGEST)
        {
            let len = letter.bytes().len();
            let reason = format!("a message of {len} bytes to rank {to}: MPI counts to {LONGEST}");
            return Err(self.fail(FabricError::Refused { rank: self.life.rank, reason }, None));
        }
        if let Err(error) = self.begin(&mine, sends, receives) {
            let fault = self.failed(&error);
            return Err(self.give_up(fault));
        }
        let mut letters: Vec<Option<Letter>> = vec![None; receives.len()];
        let mut wait = Wait::until(deadline);
        // Whoever sends much without ever receiving waits for its readers, and reads meanwhile.
        let is_ahead = self.sending.places() > UNREAD;
        while self.flight.left() > 0 || (is_ahead && self.sending.left() > 0) {
            let taken = self.take(call, &mine, receives, &mut letters);
            let outcome = match taken.and_then(|news| Ok(news | (is_ahead && self.push_sending()?)))
            {
                Ok(false) => self.idle(&mut wait, &mine),
                other => other,
            };
            match outcome {
                Ok(true) => {}
                Ok(false) => {
                    let (peer, what) = self.missing(receives, &letters);
                    let fault = FabricError::Deadline { rank: self.life.rank, peer, what };
                    return Err(self.give_up(fault));
                }
                Err(fault) => return Err(self.give_up(fault)),
            }
        }
        Ok(letters.into_iter().flatten().collect())
    }

    /// Rank 0 hears from everyone, then tells everyone.
    fn decide(
        &mut self,
        call: &Call,
        mine: &[u8; CALL],
        wait: &mut Wait,
    ) -> Result<(), FabricError> {
        let ranks = self.life.ranks;
        self.flight.clear();
        for peer in 1..ranks {
            let draft = self.pool.draft(CALL + 8);
            let posted = self.flight.receive(self.comm, peer, ARRIVALS, draft);
            posted.map_err(|error| self.failed(&error))?;
        }
        while self.flight.left() > 0 {
            let mut arrived = Vec::new();
            let polled = self.flight.poll(&mut arrived);
            polled.map_err(|error| self.failed(&error))?;
            if arrived.is_empty() && !self.idle(wait, mine)? {
                let peer = (1..ranks).find(|peer| !self.flight.has_landed(peer - 1)).unwrap_or(0);
                let what = "for the end of the call on";
                return Err(FabricError::Deadline { rank: 0, peer, what });
            }
            for (place, cargo, count) in arrived {
                let Cargo::Received(draft) = cargo else { continue };
                let letter = self.pool.seal(draft);
                self.hear(call, mine, place + 1, &letter.bytes()[..count])?;
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

    /// The other ranks tell rank 0, and wait for what it says.
    fn arrive(&mut self, mine: &[u8; CALL], wait: &mut Wait) -> Result<(), FabricError> {
        self.flight.clear();
        let arrival = self.pool.write(CALL + 8, |out| {
            out[..8].copy_from_slice(&self.number.to_le_bytes());
            out[8..].copy_from_slice(mine);
        });
        let draft = self.pool.draft(8);
        let posted = self
            .flight
            .receive(self.comm, 0, DECISIONS, draft)
            .and_then(|_| self.flight.send(self.comm, 0, ARRIVALS, arrival));
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
        let mut landed = std::mem::take(&mut self.landed);
        let polled = self.flight.poll(&mut landed);
        for (_, cargo, _) in landed.drain(..) {
            if let Cargo::Received(draft) = cargo {
                drop(self.pool.seal(draft));
            }
        }
        self.landed = landed;
        polled.map_err(|error| self.failed(&error))?;
        Ok(self.flight.left() == 0)
    }

    /// Lets go of short messages that have been sent.
    pub(crate) fn push_outgoing(&mut self) {
        let mut landed = Vec::new();
        // Whoever they are for may be gone, which others find out.
        let _ = self.outgoing.poll(&mut landed);
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
        sends: &[(Rank, Letter)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Letter>, FabricError> {
        self.places.clear();
        self.step(call, sends, receives, deadline)
    }

    fn lands(&self, bytes: usize) -> bool {
        bytes > INLINE
    }

    fn exchange_into(
        &mut self,
        call: &Call,
        sends: &[(Rank, Letter)],
        receives: Vec<(Rank, Option<Draft>)>,
        deadline: Instant,
    ) -> Result<Vec<Letter>, FabricError> {
        let from: Vec<Rank> = receives.iter().map(|(from, _)| *from).collect();
        self.places.clear();
        self.places.extend(receives.into_iter().map(|(_, place)| place));
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
                self.flight.abandon();
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
        self.take_leave();
    }
}
