// SPDX-License-Identifier: Apache-2.0
//! Whether the bytes are right: sums that came with them, and the same items done again by somebody else.

use std::ops::Range;
use std::time::Duration;

use crc_fast::{CrcAlgorithm, checksum};

use super::{IncidentKind, Ledger};
use crate::claims::{Piece, Set, Why, only};
use crate::error::StealError;

/// Pieces that the comparisons of one task are cut into.
const MOST_PIECES: usize = 64;

/// Items that are done again to compare, and who came to which result.
pub(super) struct Audit {
    items: Range<usize>,
    votes: Vec<(usize, u64)>,
}

impl Audit {
    /// Whose result is in question.
    pub(super) fn first(&self) -> usize {
        self.votes[0].0
    }

    /// Whoever is not trusted has not voted.
    pub(super) fn forget(&mut self, backend: usize) {
        self.votes.retain(|vote| vote.0 != backend);
    }

    pub(super) fn items(&self) -> Range<usize> {
        self.items.clone()
    }

    fn voters(&self) -> Set {
        self.votes.iter().fold(0, |all, (backend, _)| all | only(*backend))
    }
}

/// What stands for the bytes of some outputs.
pub(super) fn digest(out: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, out)
}

/// The checksum of one unit's bytes, as tasks carry them.
#[must_use]
pub fn unit_sum(out: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, out) as u32
}

/// The checksums of all units of some outputs; units without bytes have one all the same.
pub(crate) fn unit_sums(out: &[u8], items: usize, grain: usize, bytes: usize) -> Vec<u32> {
    let mut sums: Vec<u32> = out.chunks(grain.saturating_mul(bytes).max(1)).map(unit_sum).collect();
    sums.resize(items.div_ceil(grain), unit_sum(&[]));
    sums
}

/// A part from 0 to 1, by the higher bits of a number that looks random.
pub(crate) fn part_of(chance: u64) -> f64 {
    (chance >> 11) as f64 / (1u64 << 53) as f64
}

/// A number that looks random and depends on its arguments alone.
pub(crate) fn mix(seed: u64, value: u64) -> u64 {
    let mut x = seed ^ value.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Ledger {
    /// The bytes of `items` among the outputs of `all`.
    fn part<'o>(&self, out: &'o [u8], all: &Range<usize>, items: &Range<usize>) -> &'o [u8] {
        let at = |item: usize| (item - all.start) * self.bytes;
        &out[at(items.start)..at(items.end)]
    }

    /// The first unit whose sum is wrong or missing.
    pub(super) fn wrong_sum(
        &self,
        items: &Range<usize>,
        out: &[u8],
        sums: Option<&[u32]>,
    ) -> Option<Range<usize>> {
        let sums = sums.unwrap_or(&[]);
        let units = items.clone().step_by(self.grain);
        if sums.len() != units.len() {
            return Some(items.clone());
        }
        let mut units = units.map(|start| start..items.end.min(start + self.grain)).zip(sums);
        units
            .find(|(unit, sum)| unit_sum(self.part(out, items, unit)) != **sum)
            .map(|(unit, _)| unit)
    }

    /// Chooses what of a task is done again by others.
    pub(super) fn choose_audits(&mut self, backend: usize, items: &Range<usize>, out: &[u8]) {
        let sample = self.options.sample;
        if sample <= 0.0 || self.others(only(backend)) == 0 {
            return;
        }
        let units = items.len().div_ceil(self.grain);
        let chance = mix(self.options.seed ^ self.epoch, items.start as u64);
        let exact = sample * units as f64;
        let rest = exact.fract() > part_of(chance);
        let mut count = exact as usize + usize::from(rest);
        if self.members[backend].chunks == 1 {
            count = count.max(1);
        }
        let last = items.start + (units - 1) * self.grain..items.end;
        let of_last = digest(self.part(out, items, &last));
        let skipped = units - count.min(units);
        let offset =
            if skipped == 0 { 0 } else { (mix(chance, 1) % (skipped as u64 + 1)) as usize };
        self.members[backend].unconfirmed = (offset + count < units).then_some((last, of_last));
        // Pieces that the slowest does in one short task, so that nobody waits long for a comparison; but not too many.
        let few = count.div_ceil(MOST_PIECES) * self.grain;
        let step = self.audit_items().max(few);
        let start = items.start + offset * self.grain;
        let end = items.end.min(start + count * self.grain);
        for start in (start..end).step_by(step) {
            let window = start..end.min(start + step);
            let vote = (backend, digest(self.part(out, items, &window)));
            self.ask(window, vec![vote]);
        }
    }

    /// The most items of one comparison, in whole units.
    fn audit_items(&self) -> usize {
        let rates = self.members.iter().map(|member| member.rate.items_per_second());
        let slowest = rates.filter(|rate| *rate > 0.0).fold(f64::INFINITY, f64::min);
        let items = slowest * self.options.cap.as_secs_f64() / 4.0;
        let units = if items.is_finite() { items as usize / self.grain } else { 1 };
        units.max(1).saturating_mul(self.grain).min(self.items)
    }

    /// Backends that work and are not in `these`.
    fn others(&self, these: Set) -> Set {
        self.working() & !these
    }

    /// Asks for another opinion about `items`.
    fn ask(&mut self, items: Range<usize>, votes: Vec<(usize, u64)>) {
        let audit = Audit { items: items.clone(), votes };
        let not_by = audit.voters();
        self.audits.push(audit);
        self.claims.give_back(Piece::new(items, Why::Audit, not_by));
    }

    /// Asks about the last unit of everybody whose last task was not looked at. Returns whether there was anything.
    pub(super) fn last_audits(&mut self) -> bool {
        if self.last_round {
            return false;
        }
        self.last_round = true;
        for backend in 0..self.members.len() {
            let member = &mut self.members[backend];
            if member.capabilities.trusted {
                continue;
            }
            if let Some((items, digest)) = member.unconfirmed.take()
                && self.others(only(backend)) != 0
            {
                self.ask(items, vec![(backend, digest)]);
            }
        }
        !self.audits.is_empty()
    }

    /// A second backend has done `items` as well.
    pub(super) fn vote(&mut self, backend: usize, items: Range<usize>, digest: u64, at: Duration) {
        let Some(place) = self.audits.iter().position(|audit| audit.items == items) else { return };
        // Only another backend can confirm a result, whatever this was given out for.
        if self.audits[place].voters() & only(backend) != 0 {
            return;
        }
        self.audited += items.len();
        let mut audit = self.audits.swap_remove(place);
        audit.votes.push((backend, digest));
        let agree = |digest: u64| audit.votes.iter().filter(move |vote| vote.1 == digest);
        if agree(digest).count() == audit.votes.len() {
            self.members[audit.first()].confirmed.insert(items);
            return;
        }
        let trusted = |backend: usize| self.members[backend].capabilities.trusted;
        let mut trusted = audit.votes.iter().filter(|vote| trusted(vote.0)).map(|vote| vote.1);
        let truth = match (trusted.next(), trusted.next()) {
            (Some(truth), None) => Some(truth),
            _ => audit.votes.iter().map(|vote| vote.1).find(|digest| agree(*digest).count() > 1),
        };
        let Some(truth) = truth else {
            if self.others(audit.voters()) == 0 {
                self.disagree(&audit);
            } else {
                self.ask(items, audit.votes);
            }
            return;
        };
        if audit.votes[0].1 == truth {
            self.members[audit.first()].confirmed.insert(items.clone());
        }
        for (liar, _) in audit.votes.iter().filter(|vote| vote.1 != truth) {
            let what = "others came to other bytes".to_owned();
            self.note(*liar, IncidentKind::WrongBytes, items.clone(), what, at);
            self.distrust(*liar, "it gave wrong bytes".to_owned(), at);
        }
    }

    /// Asks again for comparisons that nobody holds although they were given out. Returns what they are about.
    pub(super) fn sweep_audits(&mut self) -> Vec<Range<usize>> {
        let waiting: Vec<_> =
            self.claims.given_back().into_iter().filter(|(_, audit)| *audit).collect();
        let gone = |audit: &&Audit| !waiting.iter().any(|(items, _)| *items == audit.items);
        let gone: Vec<_> = self.audits.iter().filter(gone).collect();
        for audit in &gone {
            let (items, not_by) = (audit.items(), audit.voters());
            self.claims.give_back(Piece::new(items, Why::Audit, not_by));
        }
        gone.into_iter().map(Audit::items).collect()
    }

    /// Nobody is left who could do `items` again.
    pub(super) fn give_up_audit(&mut self, items: &Range<usize>) {
        let Some(place) = self.audits.iter().position(|audit| audit.items == *items) else {
            return;
        };
        let audit = self.audits.swap_remove(place);
        if audit.votes.len() > 1 {
            self.disagree(&audit);
        }
    }

    /// Whether a comparison of any of `items` is still to come.
    #[must_use]
    pub fn is_doubtful(&self, items: &Range<usize>) -> bool {
        self.audits.iter().any(|a| a.items.start < items.end && items.start < a.items.end)
    }

    fn disagree(&mut self, audit: &Audit) {
        let name = |vote: usize| self.members[audit.votes[vote].0].name.clone();
        let backends = [name(0), name(1)];
        let unfinished = self.unfinished();
        self.end(StealError::Disagreement { items: audit.items.clone(), backends, unfinished });
    }
}
