// SPDX-License-Identifier: Apache-2.0
//! The half of the kernel that one thread owns: who holds which items under which token until when, what is done, and
//! who is trusted with more. It is told what happens and when; it has no clock, no threads and no bytes of its own,
//! so that it runs the same in virtual time.
//!
//! At any time an item is in one place: not given out (a cursor of [`Claims`] has not come to it), given out and on its
//! way here, taken (a lease has it), spare (it came back), or done. Only here does an item become done, and
//! only from a lease that is held under the token of the answer.

pub(crate) mod audit;
mod giving;
mod pace;
mod record;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Capabilities, Failure};
use crate::claims::{Claims, Piece, Set, Why, only};
use crate::error::StealError;
use crate::job::{Job, Options};
use crate::rate::Rate;
use crate::report::{Incident, IncidentKind, Report};
use crate::spans::Spans;
use audit::Audit;

/// A unit that has failed so often is not given out again, whoever has not tried it.
const MOST_FAILURES: u32 = 1000;

/// What an answer must show to be accepted: the run, the lane, and which of the lane's leases it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token {
    /// The run.
    pub epoch: u64,
    /// The lane: one of the tasks that a backend works on at a time.
    pub lane: usize,
    /// The lease, counted by the lane.
    pub serial: u64,
}

/// What becomes of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The outputs count: they go to where the job wants them.
    Commit,
    /// The outputs were only to be compared.
    Compared,
    /// The outputs do not count.
    Refuse,
}

/// A backend as the ledger is told of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Its name in reports.
    pub name: String,
    /// What it says about itself.
    pub capabilities: Capabilities,
}

/// What became of a piece that is given back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Nothing is known against it.
    Unharmed,
    /// It took too long.
    Late,
    /// It failed.
    Failed,
}

struct Lease {
    token: Token,
    piece: Piece,
    at: Duration,
}

enum Slot {
    /// Nothing is known of the lane's doings.
    Idle,
    Held(Lease),
    /// The lane had this lease for too long: others may take the items, and until then its answer counts.
    Overdue(Lease),
    /// The lane had this lease, and it was taken away. Its answer may come yet.
    Lost(Lease),
}

impl Slot {
    /// Whether the lane is not in a task that takes too long.
    fn answers(&self) -> bool {
        matches!(self, Slot::Idle | Slot::Held(_))
    }
}

struct Lane {
    backend: usize,
    slot: Slot,
}

struct Standing {
    name: String,
    capabilities: Capabilities,
    rate: Rate,
    strikes: u32,
    benched: Option<String>,
    done: Spans,
    /// What of it another backend has confirmed.
    confirmed: Spans,
    chunks: usize,
    last_chunk: usize,
    /// The largest task that it completed.
    largest: usize,
    /// The last unit of its last task and the digest of its bytes, until somebody has confirmed it.
    unconfirmed: Option<(Range<usize>, u64)>,
}

/// How a run ended.
enum Outcome {
    Finished,
    Failed(StealError),
}

/// The record of a run.
pub struct Ledger {
    epoch: u64,
    items: usize,
    bytes: usize,
    grain: usize,
    most_items: usize,
    options: Options,
    bands: Vec<Range<usize>>,
    claims: Arc<Claims>,
    lanes: Vec<Lane>,
    members: Vec<Standing>,
    done: Spans,
    taken: Spans,
    spare: Spans,
    thrown_out: Vec<Range<usize>>,
    audits: Vec<Audit>,
    last_round: bool,
    /// Backends take what is left however slow they are.
    nobody_waits: bool,
    outcome: Option<Outcome>,
    /// When something was last heard, and when the last output was accepted.
    heard: Duration,
    /// When time was last told.
    ticked: Duration,
    /// Whether items that nobody holds have been looked for since then.
    swept: bool,
    accepted: Duration,
    /// When whoever keeps this was last back from elsewhere.
    resumed: Duration,
    redone: usize,
    audited: usize,
    duplicated: usize,
    incidents: Vec<Incident>,
    more_incidents: usize,
}

impl Ledger {
    /// Opens the record of a run: its number, the job, and who takes part. Returns it with what those who claim share.
    ///
    /// # Errors
    ///
    /// What [`Job::check`] says.
    pub fn open(
        epoch: u64,
        job: &Job,
        members: Vec<Member>,
    ) -> Result<(Ledger, Arc<Claims>), StealError> {
        job.check(members.len())?;
        let bands = job.bands();
        let cap = job.options.cap.as_secs_f64();
        let claims = Arc::new(Claims::new(&bands, job.unit(), members.len(), cap));
        let lanes = members.iter().enumerate().flat_map(|(backend, member)| {
            let lane = move |_| Lane { backend, slot: Slot::Idle };
            (0..member.capabilities.lanes()).map(lane)
        });
        let mut ledger = Ledger {
            epoch,
            items: job.items,
            bytes: job.bytes,
            grain: job.unit(),
            most_items: job.most_items(),
            options: job.options.clone(),
            bands,
            claims: Arc::clone(&claims),
            lanes: lanes.collect(),
            members: members.into_iter().map(Standing::new).collect(),
            done: Spans::new(),
            taken: Spans::new(),
            spare: Spans::new(),
            thrown_out: Vec::new(),
            audits: Vec::new(),
            last_round: false,
            nobody_waits: false,
            outcome: None,
            heard: Duration::ZERO,
            ticked: Duration::ZERO,
            swept: false,
            accepted: Duration::ZERO,
            resumed: Duration::ZERO,
            redone: 0,
            audited: 0,
            duplicated: 0,
            incidents: Vec::new(),
            more_incidents: 0,
        };
        ledger.publish(Duration::ZERO);
        Ok((ledger, claims))
    }

    /// The backend of every lane, in order.
    pub fn lanes(&self) -> impl Iterator<Item = usize> + '_ {
        self.lanes.iter().map(|lane| lane.backend)
    }

    /// A lane has claimed `piece` and works on it under `token`.
    pub fn claimed(&mut self, token: Token, piece: Piece, at: Duration) {
        self.hear(at);
        if token.epoch != self.epoch || token.lane >= self.lanes.len() {
            return;
        }
        if let Slot::Held(lease) = self.put(token.lane, Slot::Idle) {
            // Its answer got lost on the way.
            self.give_back(lease.piece, token.lane, Why::Again, Fate::Unharmed);
        }
        if piece.why == Why::Overdue {
            self.lose_overdue(&piece.items, at);
        }
        let lease = Lease { token, piece, at };
        let free = match lease.piece.why {
            Why::Audit => true,
            Why::Again | Why::Overdue => {
                self.spare.remove(lease.piece.items.clone()) == lease.piece.items.len()
            }
            Why::Fresh => {
                let items = &lease.piece.items;
                let known = [&self.done, &self.taken, &self.spare];
                known.iter().all(|known| !known.overlaps(items))
            }
        };
        let backend = self.lanes[token.lane].backend;
        let benched = self.members[backend].benched.is_some();
        if free && !lease.piece.is_audit() {
            self.taken.insert(lease.piece.items.clone());
        }
        if free && !benched && self.outcome.is_none() {
            self.put(token.lane, Slot::Held(lease));
        } else {
            if free {
                self.give_back(lease.piece.clone(), token.lane, Why::Again, Fate::Unharmed);
            }
            self.put(token.lane, Slot::Lost(lease));
            // While it was on its way, those who may have it may have gone.
            self.settle(at);
        }
    }

    /// A lane says that it has done `items` under `token`, and these are the outputs. With checksums, `sums` has one
    /// for each unit.
    pub fn completed(
        &mut self,
        token: Token,
        items: Range<usize>,
        out: &[u8],
        sums: Option<&[u32]>,
        at: Duration,
    ) -> Verdict {
        self.hear(at);
        let Some((lease, holds)) = self.release(token, at) else { return Verdict::Refuse };
        let backend = self.lanes[token.lane].backend;
        if !holds {
            // It took so long: that is worth knowing.
            self.time(backend, &lease, at);
            let late = at.saturating_sub(lease.at);
            let what = format!("the answer took {late:.1?}, and the lease was lost");
            self.note(backend, IncidentKind::Refused, lease.piece.items, what, at);
            self.publish(at);
            return Verdict::Refuse;
        }
        if items != lease.piece.items || out.len() != items.len().saturating_mul(self.bytes) {
            let what = format!("the answer was for items {}..{}", items.start, items.end);
            self.note(backend, IncidentKind::Lied, lease.piece.items.clone(), what.clone(), at);
            self.give_back(lease.piece, token.lane, Why::Again, Fate::Failed);
            self.distrust(backend, what, at);
            self.settle(at);
            return Verdict::Refuse;
        }
        self.time(backend, &lease, at);
        if self.options.checksums
            && let Some(unit) = self.wrong_sum(&items, out, sums)
        {
            let what = "the checksum of the bytes is not that of the backend".to_owned();
            self.note(backend, IncidentKind::WrongBytes, unit, what, at);
            self.give_back(lease.piece, token.lane, Why::Again, Fate::Failed);
            self.bench(backend, "wrong bytes arrived from it".to_owned(), at);
            self.settle(at);
            return Verdict::Refuse;
        }
        if lease.piece.is_audit() {
            self.vote(backend, items, audit::digest(out), at);
            self.settle(at);
            return Verdict::Compared;
        }
        self.taken.remove(items.clone());
        self.duplicated += items.len() - self.done.insert(items.clone());
        self.accepted = self.accepted.max(at);
        let member = &mut self.members[backend];
        member.done.insert(items.clone());
        member.strikes = 0;
        member.chunks += 1;
        member.last_chunk = items.len();
        member.largest = member.largest.max(items.len());
        self.choose_audits(backend, &items, out);
        self.settle(at);
        Verdict::Commit
    }

    /// A lane could not do what it had under `token`.
    pub fn failed(&mut self, token: Token, failure: &Failure, at: Duration) {
        self.hear(at);
        let Some((lease, holds)) = self.release(token, at) else { return };
        let backend = self.lanes[token.lane].backend;
        let piece = lease.piece;
        if self.members[backend].benched.is_some() {
            return;
        }
        self.note(backend, IncidentKind::Failed, piece.items.clone(), failure.to_string(), at);
        // What failed elsewhere as well says nothing about this backend.
        let strike = piece.failures == 0 || piece.is_audit();
        if holds && self.give_up(piece, token.lane, failure) {
            return;
        }
        let member = &mut self.members[backend];
        member.strikes += u32::from(strike);
        if failure.is_lasting() || member.strikes >= self.options.strikes {
            self.bench(backend, failure.to_string(), at);
        }
        self.settle(at);
    }

    /// Time has come to `now`: leases that ran out are taken away, and items that nobody holds are given out again.
    pub fn tick(&mut self, now: Duration) {
        if self.outcome.is_some() {
            return;
        }
        let since = now.saturating_sub(std::mem::replace(&mut self.ticked, now));
        if since > self.patience() / 2 {
            // The clock has jumped, or this machine was asleep: nobody can be blamed for that.
            self.hear(now);
        }
        let mut expired = false;
        for lane in 0..self.lanes.len() {
            let Slot::Held(lease) = &self.lanes[lane].slot else { continue };
            let held = now.saturating_sub(lease.at.max(self.resumed));
            if held < self.lease_time(lane, lease) {
                continue;
            }
            let Slot::Held(lease) = self.put(lane, Slot::Idle) else { continue };
            self.give_back(lease.piece.clone(), lane, Why::Overdue, Fate::Late);
            if lease.piece.is_audit() {
                self.lose(lane, lease, now);
            } else {
                self.put(lane, Slot::Overdue(lease));
            }
            expired = true;
        }
        // Somebody is to have the time to take them, if there is anybody.
        if expired && self.available() != 0 {
            self.hear(now);
        }
        self.settle(now);
        if self.outcome.is_some() || self.lanes.iter().any(|l| matches!(l.slot, Slot::Held(_))) {
            return;
        }
        let waited = now.saturating_sub(self.heard);
        if waited >= self.options.lease {
            self.swept = true;
            self.sweep(now);
            // Whoever should have taken what is left does not: then it is for anybody.
            self.nobody_waits = true;
            self.settle(now);
            self.claims.stir();
        }
        if waited >= self.patience() {
            // Nobody is there to compare what is left to compare, and nobody is asked for more.
            self.last_round = true;
            while let Some(items) = self.audits.first().map(|audit| audit.items()) {
                self.give_up_audit(&items);
            }
            self.settle(now);
            // Whoever is silent is named.
            self.lose_overdue(&(0..self.items), now);
            let unfinished = self.unfinished();
            self.end(StealError::Stalled { waited, unfinished });
        }
    }

    /// Something happened. It may have been told late.
    fn hear(&mut self, at: Duration) {
        self.heard = at.max(self.resumed);
        self.swept = false;
    }

    /// How long nothing may happen.
    fn patience(&self) -> Duration {
        // A job that is done waits a third of it for comparisons that nobody seems to make.
        let all_done = self.done.len() == self.items;
        if all_done { self.options.patience / 3 } else { self.options.patience }
    }

    /// Whoever keeps the record was elsewhere until `now`, and did not hear of answers: leases count from now on.
    pub fn resume(&mut self, now: Duration) {
        self.resumed = self.resumed.max(now);
        self.hear(now);
    }

    /// A backend takes no part, from the start.
    pub fn leave_out(&mut self, backend: usize, why: &str) {
        self.bench(backend, why.to_owned(), Duration::ZERO);
        self.settle(Duration::ZERO);
    }

    /// Lanes that have not answered in time.
    #[must_use]
    pub fn stuck_lanes(&self) -> usize {
        self.lanes.iter().filter(|lane| !lane.slot.answers()).count()
    }

    /// The job is to end now.
    pub fn cancel(&mut self) {
        let unfinished = self.unfinished();
        self.end(StealError::Cancelled(unfinished));
    }

    /// Whether the run is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.outcome.is_some()
    }

    /// Whether the run is over and the job is not done.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        matches!(self.outcome, Some(Outcome::Failed(_)))
    }

    /// Closes the record.
    ///
    /// # Errors
    ///
    /// Why the run did not finish.
    pub fn close(mut self) -> Result<Report, StealError> {
        match self.outcome.take() {
            Some(Outcome::Finished) => Ok(self.report()),
            Some(Outcome::Failed(error)) => Err(error),
            None => Err(StealError::Cancelled(self.unfinished())),
        }
    }

    /// The items that are done.
    #[must_use]
    pub fn done(&self) -> &Spans {
        &self.done
    }

    /// Takes the lease of `token` from its lane, and whether it still holds. One that is overdue does if nobody has taken
    /// its items.
    fn release(&mut self, token: Token, at: Duration) -> Option<(Lease, bool)> {
        if token.epoch != self.epoch {
            return None;
        }
        let lane = self.lanes.get(token.lane)?;
        let backend = lane.backend;
        let lease = match &lane.slot {
            Slot::Held(lease) | Slot::Overdue(lease) | Slot::Lost(lease) => Some(lease),
            Slot::Idle => None,
        };
        if lease.is_none_or(|lease| lease.token != token) {
            let what = "an answer to no lease".to_owned();
            self.note(backend, IncidentKind::Refused, 0..0, what, at);
            return None;
        }
        match self.put(token.lane, Slot::Idle) {
            Slot::Held(lease) => Some((lease, true)),
            Slot::Overdue(lease) => {
                let holds = self.retract(&lease.piece);
                Some((lease, holds))
            }
            Slot::Lost(lease) => Some((lease, false)),
            Slot::Idle => None,
        }
    }

    fn put(&mut self, lane: usize, slot: Slot) -> Slot {
        std::mem::replace(&mut self.lanes[lane].slot, slot)
    }

    /// Backends that may get more work.
    fn working(&self) -> Set {
        let working = |(place, member): (usize, &Standing)| {
            if member.benched.is_none() { only(place) } else { 0 }
        };
        self.members.iter().enumerate().map(working).fold(0, |all, one| all | one)
    }

    /// Backends with a lane that can claim, or will when it has answered.
    fn available(&self) -> Set {
        let lanes = self.lanes.iter().filter(|lane| lane.slot.answers());
        lanes.fold(0, |all, lane| all | only(lane.backend)) & self.working()
    }

    /// Gives a backend no more work, and others what it had and what it did and nobody confirmed.
    fn distrust(&mut self, backend: usize, why: String, at: Duration) {
        self.throw_out(backend);
        self.bench(backend, why, at);
    }

    /// Gives a backend no more work, and others what it had.
    fn bench(&mut self, backend: usize, why: String, at: Duration) {
        let member = &mut self.members[backend];
        if member.benched.is_some() {
            return;
        }
        member.benched = Some(why.clone());
        member.unconfirmed = None;
        self.claims.bench(backend);
        self.note(backend, IncidentKind::Benched, 0..0, why, at);
        for lane in 0..self.lanes.len() {
            if self.lanes[lane].backend != backend {
                continue;
            }
            match self.put(lane, Slot::Idle) {
                Slot::Held(lease) => {
                    self.give_back(lease.piece.clone(), lane, Why::Again, Fate::Unharmed);
                    self.put(lane, Slot::Lost(lease));
                }
                Slot::Overdue(lease) => {
                    self.put(lane, Slot::Lost(lease));
                }
                slot => {
                    self.put(lane, slot);
                }
            }
        }
    }

    /// The items whose outputs were accepted and do not count after all, since the last call.
    pub fn drain_thrown_out(&mut self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.thrown_out.drain(..)
    }

    /// Sees whether all is done, and tells those who claim what is known.
    fn settle(&mut self, at: Duration) {
        if self.outcome.is_some() {
            return;
        }
        if self.working() == 0 && self.done.len() < self.items {
            let unfinished = self.unfinished();
            return self.end(StealError::AllLost(unfinished));
        }
        // Nobody seems to be there: then whoever comes may have it.
        let available = if self.nobody_waits { 0 } else { self.available() };
        for piece in self.claims.lift_bans(available, self.working()) {
            self.give_up_audit(&piece.items);
        }
        if self.done.len() == self.items && self.audits.is_empty() && !self.last_audits() {
            self.outcome = Some(Outcome::Finished);
            self.claims.close();
        }
        self.publish(at);
    }

    fn end(&mut self, error: StealError) {
        if self.outcome.is_none() {
            self.outcome = Some(Outcome::Failed(error));
            self.claims.close();
        }
    }
}

impl Standing {
    fn new(member: Member) -> Standing {
        let Member { name, capabilities } = member;
        let launch = capabilities.launch.map(|launch| launch.as_secs_f64());
        Standing {
            name,
            capabilities,
            rate: Rate::told(capabilities.rate, launch),
            strikes: 0,
            benched: None,
            done: Spans::new(),
            confirmed: Spans::new(),
            chunks: 0,
            last_chunk: 0,
            largest: 0,
            unconfirmed: None,
        }
    }
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger")
            .field("epoch", &self.epoch)
            .field("items", &self.items)
            .field("done", &self.done.len())
            .finish_non_exhaustive()
    }
}
