// SPDX-License-Identifier: Apache-2.0
//! How a group agrees on its first fault.
//!
//! The lowest rank that lives decides. A rank that cannot go on notifies all lower ones and waits for the verdict. If
//! none comes for [`GRACE`] from each of them that lives, because they are silent, it decides itself. Whoever decides
//! notifies everyone. Verdicts are adopted before anything else counts, so a rank that was silent all the time adopts the
//! one that it finds.
//!
//! Deadlines pass in chains: a rank waits for one that waits for one that is gone. Whose clock runs out first is
//! chance, so whoever decides on a deadline hears the others for a moment and follows the chain to its end.

use std::time::{Duration, Instant};

use spanker_collective::Rank;
use spanker_fabric::FabricError;
use spanker_fabric::wire::{CALL, Notice, as_received, call_of};

use crate::end::{End, Peer};
use crate::frame::{Head, Kind};
use crate::link::Link;

/// How long a lower rank may take to answer.
const GRACE: Duration = Duration::from_millis(500);
/// How long other ranks may take to say that their deadlines have passed, too.
const GATHERING: Duration = Duration::from_millis(250);
/// How long notices may take to get out.
const SENDING: Duration = Duration::from_millis(100);

/// What this rank has been notified of.
#[derive(Debug)]
pub(crate) struct Notices {
    /// The call that each rank says it is waiting in, with its number.
    at: Vec<Option<(u64, [u8; CALL])>>,
    heard: Option<FabricError>,
    /// The deadline that each rank has missed, and for whom.
    late: Vec<Option<FabricError>>,
    verdict: Option<FabricError>,
    is_failing: bool,
}

impl Notices {
    pub(crate) fn new(ranks: usize) -> Notices {
        let (at, late) = (vec![None; ranks], vec![None; ranks]);
        Notices { at, heard: None, late, verdict: None, is_failing: false }
    }

    /// The group's fault.
    pub(crate) fn verdict(&self) -> Option<FabricError> {
        self.verdict.clone()
    }

    /// The fault of a rank may be that its own deadline has passed.
    fn note_late(&mut self, of: Rank, fault: &FabricError) {
        if matches!(fault, FabricError::Deadline { rank, .. } if *rank == of) {
            self.late[of] = Some(fault.clone());
        }
    }

    /// Where the chain of deadlines that begins with this fault ends: with a rank that nobody has heard of.
    fn end_of_chain<'f>(&'f self, fault: &'f FabricError) -> &'f FabricError {
        let mut end = fault;
        for _ in 0..self.late.len() {
            let FabricError::Deadline { peer, .. } = end else { break };
            match self.late.get(*peer).and_then(Option::as_ref) {
                Some(next) => end = next,
                None => break,
            }
        }
        end
    }

    /// Whether messages are of no more use.
    pub(crate) fn is_failing(&self) -> bool {
        self.is_failing || self.verdict.is_some()
    }
}

impl End {
    /// Sends a notice, and does not wait for it.
    fn notify(&mut self, to: Rank, notice: &Notice) {
        self.say(to, Head::of_kind(Kind::Notice), &notice.bytes());
    }

    /// Messages are of no more use, those that have come included.
    pub(crate) fn discard_messages(&mut self) {
        self.notices.is_failing = true;
        self.peers.iter_mut().for_each(Peer::forget_messages);
    }

    /// The first rank that is gone.
    pub(crate) fn dead(&self) -> Option<Rank> {
        self.peers.iter().position(|peer| peer.is_dead())
    }

    /// How many ranks below this one are left.
    fn lower(&self) -> u32 {
        self.peers[..self.rank].iter().filter(|peer| !peer.is_dead()).count() as u32
    }

    /// Takes a notice of a rank.
    pub(crate) fn hear(&mut self, from: Rank, notice: Notice) {
        match notice {
            Notice::At { number, call } => self.notices.at[from] = Some((number, call)),
            Notice::Verdict(fault) => {
                self.notices.verdict.get_or_insert(fault);
            }
            Notice::Fault { number, committing, fault } => {
                // Whoever waited too long for the end of a call that is complete will find that out.
                let answered = committing && number < self.number;
                if !(answered && matches!(fault, FabricError::Deadline { .. })) {
                    self.notices.note_late(from, &fault);
                    self.notices.heard.get_or_insert(fault);
                }
            }
            // The end of its connection says the same.
            Notice::Left => {}
        }
    }

    /// What this rank has been notified of while waiting in `call`: the group's fault, or one to be made that. Returns
    /// false if others have waited long enough, and this rank has, too, if not quite to its deadline: `is_late`.
    pub(crate) fn check_notices(
        &self,
        call: &[u8; CALL],
        is_late: bool,
    ) -> Result<bool, FabricError> {
        if let Some(verdict) = self.notices.verdict() {
            return Err(verdict);
        }
        if let Some(heard) = self.notices.heard.as_ref().filter(|_| self.lower() == 0) {
            return match heard {
                FabricError::Deadline { .. } if is_late => Ok(false),
                heard => Err(heard.clone()),
            };
        }
        // Others may be in another call that has no message for this rank.
        let at = self.notices.at.iter().enumerate();
        let mut others = at.filter_map(|(peer, at)| Some((peer, (*at)?)));
        let differs = others.find(|(_, (number, theirs))| *number == self.number && theirs != call);
        let fault = differs.and_then(|(peer, (_, theirs))| {
            call_of(call)?.mismatch(&call_of(&theirs)?, self.rank, peer)
        });
        fault.map_or(Ok(true), Err)
    }

    /// Whether a rank is left, besides the one at the end of a chain, that has not said yet what it waits for.
    fn may_hear_more(&self, end: Rank) -> bool {
        let mut others = self.peers.iter().zip(&self.notices.late).enumerate();
        others.any(|(rank, (peer, late))| {
            rank != self.rank && rank != end && late.is_none() && !peer.is_dead()
        })
    }

    /// Makes `fault` the group's, unless it has one. Returns the one that it has. In a call that is being committed,
    /// under `committing`, it may turn out to be complete, which is said there.
    pub(crate) fn fail(
        &mut self,
        fault: FabricError,
        mut committing: Option<&mut bool>,
    ) -> FabricError {
        if committing.is_none() {
            self.discard_messages();
        }
        // Connections that are of no more use are named by the fault already.
        let _ = self.pump(|_| true);
        if let Some(verdict) = self.notices.verdict() {
            return verdict;
        }
        let own = as_received(&fault);
        self.notices.note_late(self.rank, &own);
        let fault = self.notices.heard.get_or_insert_with(|| own.clone()).clone();
        let (number, is_committing) = (self.number, committing.is_some());
        let notice = Notice::Fault { number, committing: is_committing, fault: own };
        for lower in 0..self.rank {
            self.notify(lower, &notice);
        }
        let begun = Instant::now();
        loop {
            let _ = self.pump(|_| true);
            // What rank 0 said before its verdict counts.
            if let Some(complete) = &mut committing
                && self.decided > self.number
            {
                **complete = true;
                return fault;
            }
            if let Some(verdict) = self.notices.verdict() {
                return verdict;
            }
            let end = self.notices.end_of_chain(&fault);
            let most = match end {
                FabricError::Deadline { peer, .. } if self.may_hear_more(*peer) => {
                    GRACE * self.lower() + GATHERING
                }
                _ => GRACE * self.lower(),
            };
            let left = most.saturating_sub(begun.elapsed());
            if left.is_zero() {
                let end = end.clone();
                return self.judge(end);
            }
            self.sleep(left);
        }
    }

    /// As [`End::fail`], in a commit: rank 0 may have said meanwhile that the call is complete.
    pub(crate) fn fail_or_complete(&mut self, fault: FabricError) -> Result<(), FabricError> {
        if self.rank == 0 {
            return Err(self.fail(fault, None));
        }
        let mut complete = false;
        let fault = self.fail(fault, Some(&mut complete));
        if complete { Ok(()) } else { Err(fault) }
    }

    /// Decides, and notifies everyone.
    fn judge(&mut self, fault: FabricError) -> FabricError {
        self.notices.verdict = Some(fault.clone());
        let verdict = Notice::Verdict(fault.clone());
        for rank in 0..self.peers.len() {
            if let Some(link) = &mut self.peers[rank].link {
                link.forget_unsent();
            }
            self.notify(rank, &verdict);
        }
        let begun = Instant::now();
        let waits = |end: &End| {
            end.peers.iter().any(|peer| peer.link.as_ref().is_some_and(Link::has_unsent))
        };
        while waits(self) && begun.elapsed() < SENDING {
            let _ = self.pump(|_| true);
            if waits(self) {
                self.sleep(Duration::from_millis(1));
            }
        }
        fault
    }
}
