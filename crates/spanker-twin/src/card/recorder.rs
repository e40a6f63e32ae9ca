// SPDX-License-Identifier: Apache-2.0
//! The flight recorder: what happened last on a card. It is always on, so an entry is a few stores.

use spanker_runtime::Record;

/// Entries of the ring buffer.
const CAPACITY: usize = 4096;

/// The last entries, in a ring.
#[derive(Debug)]
pub(crate) struct Recorder {
    entries: Vec<Record>,
    written: u64,
}

impl Recorder {
    pub(crate) fn new() -> Recorder {
        Recorder { entries: vec![Record::default(); CAPACITY], written: 0 }
    }

    pub(crate) fn note(&mut self, times: (u64, u64), kind: u32, port: usize, a: u64, b: u64) {
        let (wall_ns, card_time_ps) = times;
        self.written += 1;
        let sequence = self.written;
        let port = port as u32;
        self.entries[(sequence % CAPACITY as u64) as usize] =
            Record { sequence, wall_ns, card_time_ps, kind, port, a, b };
    }

    /// Entries that are still there, from `first` on, oldest first.
    pub(crate) fn since(&self, first: u64) -> impl Iterator<Item = &Record> {
        let oldest = (self.written + 1).saturating_sub(CAPACITY as u64);
        (first.max(oldest).max(1)..=self.written)
            .map(|sequence| &self.entries[(sequence % CAPACITY as u64) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorder_keeps_the_last_entries_in_order() {
        let mut recorder = Recorder::new();
        for a in 1..=CAPACITY as u64 + 10 {
            recorder.note((a, 0), 1, 0, a, 0);
        }
        let found: Vec<u64> = recorder.since(0).map(|record| record.a).collect();
        assert_eq!(found, (11..=CAPACITY as u64 + 10).collect::<Vec<_>>());
        assert_eq!(recorder.since(CAPACITY as u64 + 10).count(), 1);
        assert_eq!(recorder.since(u64::MAX).count(), 0);
    }
}
