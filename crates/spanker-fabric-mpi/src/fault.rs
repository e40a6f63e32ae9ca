// SPDX-License-Identifier: Apache-2.0
//! How a group agrees on its first fault.
//!
//! The lowest rank that lives decides. A rank that cannot go on notifies all lower ones and waits for the verdict. If
//! none comes for [`GRACE`] from each of them that lives, because they are silent, it decides itself. Whoever
//! decides notifies everyone. Verdicts are adopted before anything else is read, so a rank that was silent all
//! the time adopts the one that it finds.

use std::time::{Duration, Instant};

use spanker_fabric::wire::{CALL, Notice, as_received, call_of};
use spanker_fabric::{Fabric, FabricError};

use crate::fabric::{MpiFabric, NOTICES};
use crate::watch::Watch;

/// How long a lower rank may take to answer.
const GRACE: Duration = Duration::from_millis(500);

/// Notices are not longer than this.
const LONGEST_NOTICE: usize = 4000;

/// What this rank has been notified of.
#[derive(Debug)]
pub(crate) struct Notices {
    /// The call that each rank says it is waiting in, with its number.
    at: Vec<Option<(u64, [u8; CALL])>>,
    left: Vec<bool>,
    heard: Option<FabricError>,
    verdict: Option<FabricError>,
}

impl Notices {
    pub(crate) fn new(ranks: usize) -> Notices {
        Notices { at: vec![None; ranks], left: vec![false; ranks], heard: None, verdict: None }
    }

    /// The group's fault.
    pub(crate) fn verdict(&self) -> Option<FabricError> {
        self.verdict.clone()
    }

    /// The first rank that is dead or has left.
    pub(crate) fn dead(&self, watch: &Watch) -> Option<usize> {
        (0..self.left.len()).find(|&rank| self.left[rank] || watch.is_dead(rank))
    }

    /// How many ranks below `rank` are left.
    fn lower(&self, rank: usize, watch: &Watch) -> usize {
        (0..rank).filter(|&rank| !self.left[rank] && !watch.is_dead(rank)).count()
    }
}

impl MpiFabric {
    /// Sends a notice, and does not wait for it.
    pub(crate) fn notify(&mut self, to: usize, notice: &Notice) {
        let bytes = notice.bytes();
        let message = self.pool.write(bytes.len(), |out| out.copy_from_slice(&bytes));
        // A rank that nothing can be sent to is dead, which is dealt with elsewhere.
        let _ = self.outgoing.send(self.comm, to, NOTICES, message);
    }

    /// Reads the notices that have come.
    fn read_notices(&mut self) {
        // What MPI refuses here it also refuses to whoever waits for messages, who reports it.
        while let Ok(Some((from, len))) = self.comm.probe(NOTICES) {
            let Ok(bytes) = self.comm.receive(from, NOTICES, len.min(LONGEST_NOTICE)) else {
                return;
            };
            match Notice::of(&bytes) {
                Some(Notice::At { number, call }) => self.notices.at[from] = Some((number, call)),
                Some(Notice::Left) => self.notices.left[from] = true,
                Some(Notice::Verdict(fault)) => {
                    self.notices.verdict.get_or_insert(fault);
                    // The next native collective has to check again.
                    self.ready = None;
                    self.life.faulty.set(true);
                }
                Some(Notice::Fault { number, committing, fault }) => {
                    // Whoever waited too long for the end of a call that is complete will find that out.
                    let answered = committing && number < self.number;
                    if !(answered && matches!(fault, FabricError::Deadline { .. })) {
                        self.notices.heard.get_or_insert(fault);
                    }
                }
                None => {}
            }
        }
    }

    /// Reads notices while waiting in `call`. The error is the group's fault, or one to be made that.
    pub(crate) fn check_notices(&mut self, call: &[u8; CALL]) -> Result<(), FabricError> {
        self.read_notices();
        if let Some(verdict) = self.notices.verdict() {
            return Err(verdict);
        }
        let rank = self.life.rank;
        let decides = self.notices.lower(rank, &self.life.watch) == 0;
        if let Some(heard) = self.notices.heard.as_ref().filter(|_| decides) {
            return Err(heard.clone());
        }
        // Others may be in another call that has no message for this rank.
        let number = self.number;
        let differs = |at: &Option<(u64, [u8; CALL])>| {
            at.is_some_and(|(other, theirs)| other == number && theirs != *call)
        };
        if let Some(peer) = self.notices.at.iter().position(differs) {
            let theirs = self.notices.at[peer].and_then(|(_, bytes)| call_of(&bytes));
            let fault = call_of(call).zip(theirs);
            if let Some(fault) = fault.and_then(|(ours, theirs)| ours.mismatch(&theirs, rank, peer))
            {
                return Err(fault);
            }
        }
        Ok(())
    }

    /// Makes `fault` the group's, unless it has one. Returns the one that it has. In a call that is being
    /// committed under `committing`, `None` stands for one that turns out to be complete.
    pub(crate) fn fail(
        &mut self,
        fault: FabricError,
        committing: Option<&mut bool>,
    ) -> FabricError {
        self.read_notices();
        if let Some(verdict) = self.notices.verdict() {
            return verdict;
        }
        let rank = self.life.rank;
        let fault = as_received(self.notices.heard.get_or_insert(fault));
        let number = self.number;
        let notice =
            Notice::Fault { number, committing: committing.is_some(), fault: fault.clone() };
        self.life.watch.check();
        for lower in (0..rank).filter(|&lower| !self.life.watch.is_dead(lower)).collect::<Vec<_>>()
        {
            self.notify(lower, &notice);
        }
        let begun = Instant::now();
        let mut complete = committing;
        loop {
            self.push_outgoing();
            self.read_notices();
            // What rank 0 said before its verdict counts.
            if let Some(complete) = &mut complete
                && matches!(self.decided(), Ok(true))
            {
                **complete = true;
                return fault;
            }
            if let Some(verdict) = self.notices.verdict() {
                return verdict;
            }
            self.life.watch.check();
            let lower = self.notices.lower(rank, &self.life.watch) as u32;
            if begun.elapsed() >= GRACE * lower {
                return self.judge(fault);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// As [`MpiFabric::fail`], in a commit: rank 0 may have said meanwhile that the call is complete.
    pub(crate) fn fail_or_complete(&mut self, fault: FabricError) -> Result<(), FabricError> {
        if self.life.rank == 0 {
            return Err(self.fail(fault, None));
        }
        let mut complete = false;
        let fault = self.fail(fault, Some(&mut complete));
        if complete { Ok(()) } else { Err(fault) }
    }

    /// Decides, and notifies everyone.
    fn judge(&mut self, fault: FabricError) -> FabricError {
        self.notices.verdict = Some(fault.clone());
        self.ready = None;
        self.life.faulty.set(true);
        let verdict = Notice::Verdict(fault.clone());
        for rank in self.others() {
            self.notify(rank, &verdict);
        }
        self.see_off();
        fault
    }

    /// The ranks that notices can be sent to.
    fn others(&self) -> Vec<usize> {
        let lives = |&rank: &usize| rank != self.rank() && !self.life.watch.is_dead(rank);
        (0..self.ranks()).filter(lives).collect()
    }

    /// Gives notices a moment to get out.
    fn see_off(&mut self) {
        let begun = Instant::now();
        while self.outgoing.left() > 0 && begun.elapsed() < Duration::from_millis(100) {
            self.push_outgoing();
            std::thread::yield_now();
        }
    }

    /// Notifies the others that this rank has left.
    pub(crate) fn announce_leaving(&mut self) {
        if self.notices.verdict.is_none() {
            for rank in self.others() {
                self.notify(rank, &Notice::Left);
            }
            let here = self.notices.left.iter().filter(|&&left| left).count();
            let expected = self.life.ranks - 1 - here;
            self.life.ended.borrow_mut().push((self.comm, expected));
        }
        self.see_off();
    }
}
