// SPDX-License-Identifier: Apache-2.0
//! How items that somebody had come to be had again: after failures, for want of an answer, for want of trust, and because
//! nobody holds them.

use std::ops::Range;
use std::time::Duration;

use super::{Fate, IncidentKind, Lease, Ledger, MOST_FAILURES, Slot};
use crate::backend::Failure;
use crate::claims::{Piece, Why, only};
use crate::error::StealError;

impl Ledger {
    /// Gives back a piece that has failed, or ends the run if that is hopeless. Returns whether it is.
    pub(super) fn give_up(&mut self, piece: Piece, lane: usize, failure: &Failure) -> bool {
        let backend = self.lanes[lane].backend;
        let untried = self.working() & !(piece.failed_on | only(backend));
        let often = piece.failures + 1;
        let enough = self.options.strikes.max(1).saturating_mul(self.members.len() as u32);
        let hopeless = !piece.is_audit()
            && !failure.is_lasting()
            && piece.items.len() <= self.grain
            && (often >= enough && untried == 0 || often >= MOST_FAILURES);
        let items = piece.items.clone();
        self.give_back(piece, lane, Why::Again, Fate::Failed);
        if hopeless {
            let unfinished = self.unfinished();
            self.end(StealError::Refused { items, last: failure.to_string(), unfinished });
        }
        hopeless
    }

    /// Leases of lanes that have had any of `items` for too long are lost: somebody else has them.
    pub(super) fn lose_overdue(&mut self, items: &Range<usize>, at: Duration) {
        for lane in 0..self.lanes.len() {
            let Slot::Overdue(lease) = &self.lanes[lane].slot else { continue };
            let theirs = &lease.piece.items;
            if theirs.start < items.end
                && items.start < theirs.end
                && let Slot::Overdue(lease) = self.put(lane, Slot::Idle)
            {
                self.lose(lane, lease, at);
            }
        }
    }

    /// A lane's lease is lost because it took too long.
    pub(super) fn lose(&mut self, lane: usize, lease: Lease, at: Duration) {
        let what = format!("no answer for {:.1?}", at.saturating_sub(lease.at));
        let items = lease.piece.items.clone();
        self.note(self.lanes[lane].backend, IncidentKind::Expired, items, what, at);
        self.put(lane, Slot::Lost(lease));
    }

    /// Takes back what was given to others, if none of them has taken any of it.
    pub(super) fn retract(&mut self, piece: &Piece) -> bool {
        let items = &piece.items;
        if piece.is_audit() || !self.claims.retract(items) {
            return false;
        }
        self.spare.remove(items.clone());
        self.taken.insert(items.clone());
        true
    }

    /// Gives a piece that a lane held to whoever wants it.
    pub(super) fn give_back(&mut self, mut piece: Piece, lane: usize, why: Why, fate: Fate) {
        let backend = only(self.lanes[lane].backend);
        piece.attempts += u32::from(fate != Fate::Unharmed);
        if piece.is_audit() {
            // Who may compare is few enough: whoever was late may try again.
            self.claims.give_back(piece);
            return;
        }
        if fate != Fate::Unharmed {
            piece.not_by |= backend;
        }
        if fate == Fate::Failed {
            piece.failures += 1;
            piece.failed_on |= backend;
        }
        self.taken.remove(piece.items.clone());
        // What has failed twice is halved, so that the item at fault is found.
        let units = piece.items.len().div_ceil(self.grain);
        let first = if piece.failures >= 2 { units.div_ceil(2) } else { units };
        let cut = piece.items.end.min(piece.items.start + first * self.grain);
        for items in [piece.items.start..cut, cut..piece.items.end] {
            self.give(Piece { items, why, ..piece.clone() });
        }
    }

    /// Gives out items that are neither done nor taken.
    pub(super) fn give(&mut self, piece: Piece) {
        if !piece.items.is_empty() {
            self.spare.insert(piece.items.clone());
            self.claims.give_back(piece);
        }
    }

    /// Takes back what a backend did and nobody confirmed.
    pub(super) fn throw_out(&mut self, backend: usize) {
        let member = &mut self.members[backend];
        let mut doubtful = member.done.clone();
        for range in member.confirmed.iter() {
            doubtful.remove(range);
        }
        for range in doubtful.iter() {
            member.done.remove(range.clone());
        }
        self.audits.retain(|audit| audit.first() != backend);
        self.audits.iter_mut().for_each(|audit| audit.forget(backend));
        for range in doubtful.iter() {
            self.redone += self.done.remove(range.clone());
            self.thrown_out.push(range.clone());
            self.give(Piece::new(range, Why::Again, 0));
        }
    }

    /// Gives out again what nobody holds although it was given out: whoever claimed it never said so.
    pub(super) fn sweep(&mut self, now: Duration) {
        let reached: Vec<_> = self.claims.given_out().collect();
        let mut found = self.sweep_audits();
        let mut gone = self.spare.clone();
        for (items, audit) in self.claims.given_back() {
            if !audit {
                gone.remove(items);
            }
        }
        for range in gone.iter() {
            self.spare.remove(range);
        }
        for (band, reached) in self.bands.iter().zip(reached) {
            let mut known = self.done.clone();
            for range in self.taken.iter().chain(self.spare.iter()) {
                known.insert(range);
            }
            found.extend(known.gaps(band.start..reached));
        }
        for range in &found {
            let what = "nobody held it".to_owned();
            self.note(usize::MAX, IncidentKind::Swept, range.clone(), what, now);
            if !self.done.covers(range) {
                self.give(Piece::new(range.clone(), Why::Again, 0));
            }
        }
        if !found.is_empty() {
            self.hear(now);
        }
    }
}
