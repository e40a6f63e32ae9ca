// SPDX-License-Identifier: Apache-2.0
//! The sending half: what waits for its acknowledgement, what may be sent, go-back-N.

use std::collections::VecDeque;

use crate::config::{MAX_WINDOW, RESERVED};
use crate::frame::Kind;

#[derive(Debug)]
struct Entry<P> {
    payload: P,
    length: u16,
    kind: Kind,
}

/// A frame that is due, as the queue knows it.
#[derive(Debug)]
pub(crate) struct Due<'a, P> {
    pub payload: &'a P,
    pub length: u16,
    pub kind: Kind,
    pub seq: u16,
    pub last: bool,
    pub again: bool,
}

/// Frames from the oldest without acknowledgement to the newest that was queued.
#[derive(Debug)]
pub(crate) struct Sender<P> {
    queue: VecDeque<Entry<P>>,
    acked: VecDeque<P>,
    dropped: VecDeque<P>,
    /// The number of the first frame in the queue.
    base: u16,
    /// Frames of the queue that have been sent at least once.
    sent: usize,
    /// The frame of the queue to send next; less than `sent` during a replay.
    cursor: usize,
    /// Frames, counted from `base`, that the peer has buffer for.
    credit: usize,
    /// The last request for a replay that was served.
    served: u16,
}

impl<P> Sender<P> {
    pub fn new() -> Self {
        Sender {
            queue: VecDeque::new(),
            acked: VecDeque::new(),
            dropped: VecDeque::new(),
            base: 0,
            sent: 0,
            cursor: 0,
            credit: 0,
            served: 0,
        }
    }

    /// Data frames that may be queued. Everything queued has credit, so nothing in the queue waits
    /// for any but the wire.
    pub fn free_slots(&self) -> usize {
        self.credit.saturating_sub(self.queue.len() + RESERVED)
    }

    pub fn free_notice_slots(&self) -> usize {
        self.credit.saturating_sub(self.queue.len())
    }

    pub fn push(&mut self, payload: P, length: u16, kind: Kind) {
        self.queue.push_back(Entry { payload, length, kind });
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether sent frames wait for their acknowledgement.
    pub fn is_waiting(&self) -> bool {
        self.sent > 0
    }

    pub fn has_due(&self) -> bool {
        self.cursor < self.queue.len()
    }

    /// The next frame to send: of a replay, or a new one.
    pub fn next(&mut self) -> Option<Due<'_, P>> {
        let entry = self.queue.get(self.cursor)?;
        let seq = self.base.wrapping_add(self.cursor as u16);
        let again = self.cursor < self.sent;
        self.cursor += 1;
        self.sent = self.sent.max(self.cursor);
        let last = entry.kind == Kind::Notice || self.cursor == self.queue.len();
        let Entry { payload, length, kind } = entry;
        Some(Due { payload, length: *length, kind: *kind, seq, last, again })
    }

    /// Applies an acknowledgement with its credit; returns how many frames and credits were new, or
    /// `None` if it is old or impossible. The credit counts from the acknowledgement beside it, so
    /// an old pair can never pass for a new one.
    pub fn acknowledge(&mut self, ack: u16, credit: u8, window: u8) -> Option<(usize, usize)> {
        let frames = usize::from(ack.wrapping_sub(self.base));
        let free = credit.wrapping_sub(ack as u8);
        if frames > self.sent || free > window.min(MAX_WINDOW) {
            return None;
        }
        self.acked.extend(self.queue.drain(..frames).map(|entry| entry.payload));
        self.base = ack;
        self.sent -= frames;
        self.cursor = self.cursor.saturating_sub(frames);
        let old = self.credit.saturating_sub(frames);
        self.credit = old.max(usize::from(free));
        Some((frames, self.credit - old))
    }

    /// Serves a request for a replay unless it is one that was served before, which repeats and
    /// duplicates are; says whether anything has to be sent again.
    pub fn serve(&mut self, request: u16) -> bool {
        let news = request.wrapping_sub(self.served);
        if news == 0 || news >= 1 << 15 {
            return false;
        }
        self.served = request;
        self.rewind()
    }

    /// Starts over with the oldest frame; says whether that was anything.
    pub fn rewind(&mut self) -> bool {
        let any = self.cursor > 0;
        self.cursor = 0;
        any
    }

    /// Forgets numbers and credits; what was queued goes to the dropped.
    pub fn reset(&mut self) {
        self.dropped.extend(self.queue.drain(..).map(|entry| entry.payload));
        self.base = 0;
        self.sent = 0;
        self.cursor = 0;
        self.credit = 0;
        self.served = 0;
    }

    /// The peer's credit at the beginning of a session.
    pub fn grant(&mut self, free: u8) {
        self.credit = usize::from(free);
    }

    pub fn pop_acked(&mut self) -> Option<P> {
        self.acked.pop_front()
    }

    pub fn pop_dropped(&mut self) -> Option<P> {
        self.dropped.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sender(frames: u16) -> Sender<u16> {
        let mut sender = Sender::new();
        sender.grant(20);
        for frame in 0..frames {
            sender.push(frame, 10, Kind::Data);
            assert!(sender.next().is_some());
        }
        sender
    }

    #[test]
    fn acknowledgement_in_the_middle_frees_what_is_before_it() {
        let mut sender = sender(5);
        assert_eq!(sender.acknowledge(3, 3 + 18, 20), Some((3, 1)));
        let acked: Vec<u16> = std::iter::from_fn(|| sender.pop_acked()).collect();
        assert_eq!(acked, [0, 1, 2]);
        assert_eq!(sender.free_slots(), 18 - 2 - RESERVED);
    }

    #[test]
    fn acknowledgement_that_is_old_or_impossible_changes_nothing() {
        let mut sender = sender(5);
        assert!(sender.acknowledge(3, 23, 20).is_some());
        assert_eq!(sender.acknowledge(2, 22, 20), None); // old
        assert_eq!(sender.acknowledge(6, 26, 20), None); // of a frame that was never sent
        assert_eq!(sender.acknowledge(4, 25, 20), None); // more credit than the peer has buffer
        assert_eq!(sender.acknowledge(5, 25, 20), Some((2, 2)));
    }

    #[test]
    fn numbers_go_on_over_their_end() {
        let mut sender = Sender::new();
        sender.grant(20);
        for frame in 0..70_000u32 {
            sender.push(frame, 1, Kind::Data);
            let due = sender.next().expect("a frame");
            assert_eq!((due.seq, due.last, due.again), (frame as u16, true, false));
            let next = (frame + 1) as u16;
            assert_eq!(sender.acknowledge(next, (next as u8).wrapping_add(20), 20), Some((1, 1)));
            assert_eq!(sender.pop_acked(), Some(frame));
        }
    }

    #[test]
    fn request_that_comes_twice_is_served_once() {
        let mut sender = sender(3);
        assert!(sender.serve(1));
        assert!(sender.next().is_some());
        assert!(!sender.serve(1));
        assert!(sender.serve(2));
        assert!(!sender.serve(1));
    }

    #[test]
    fn rewinding_repeats_from_the_oldest_and_marks_it() {
        let mut sender = sender(3);
        assert!(sender.next().is_none());
        assert!(sender.rewind());
        let again: Vec<(u16, bool, bool)> =
            std::iter::from_fn(|| sender.next().map(|due| (due.seq, due.last, due.again)))
                .collect();
        assert_eq!(again, [(0, false, true), (1, false, true), (2, true, true)]);
    }
}
