// SPDX-License-Identifier: Apache-2.0
//! The receiving half: what comes next, when to ask again, when to answer, how much may come.

use crate::frame::Header;

/// What a sequenced frame is to the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    InOrder,
    Duplicate,
    OutOfOrder,
    /// It would need more buffer than there is.
    Overrun,
}

#[derive(Debug)]
pub(crate) struct Receiver {
    window: u8,
    ack_every: u8,
    /// The number that comes next.
    expected: u16,
    /// While something is missing and has been asked for: the highest number seen since.
    gap: Option<u16>,
    /// Frames that were delivered and still occupy buffer.
    unconsumed: usize,
    /// Frames delivered since the last acknowledgement.
    unacknowledged: u8,
    /// The limit that was last announced.
    announced: u16,
    ack_due: bool,
    nak_due: bool,
    /// The number of the last request for a replay; a repeated request keeps its number.
    request: u16,
}

impl Receiver {
    pub fn new(window: u8, ack_every: u8) -> Self {
        Receiver {
            window,
            ack_every,
            expected: 0,
            gap: None,
            unconsumed: 0,
            unacknowledged: 0,
            announced: 0,
            ack_due: false,
            nak_due: false,
            request: 0,
        }
    }

    /// Forgets the numbers. Frames that the caller has not consumed still count: their buffer is in use.
    pub fn reset(&mut self) {
        *self =
            Receiver { unconsumed: self.unconsumed, ..Receiver::new(self.window, self.ack_every) };
    }

    /// What was asked for or announced in an earlier session is void in the next.
    pub fn resume(&mut self) {
        self.gap = None;
        self.nak_due = false;
        self.ack_due = true;
    }

    pub fn expected(&self) -> u16 {
        self.expected
    }

    fn free(&self) -> u8 {
        usize::from(self.window).saturating_sub(self.unconsumed) as u8
    }

    /// The first number that may not be sent yet.
    pub fn limit(&self) -> u16 {
        self.expected.wrapping_add(u16::from(self.free()))
    }

    pub fn ack_due(&self) -> bool {
        self.ack_due
    }

    pub fn nak_due(&self) -> bool {
        self.nak_due
    }

    pub fn request_ack(&mut self) {
        self.ack_due = true;
    }

    /// A frame goes out that carries the acknowledgement and the limit.
    pub fn announced(&mut self) {
        self.announced = self.limit();
        self.unacknowledged = 0;
        self.ack_due = false;
    }

    /// The frame that goes out is the request for a replay: its number.
    pub fn asked(&mut self) -> u16 {
        self.nak_due = false;
        self.request
    }

    pub fn arrive(&mut self, header: &Header) -> Arrival {
        let distance = header.seq.wrapping_sub(self.expected);
        if distance >= 1 << 15 {
            // Its acknowledgement was lost: the sender repeats until it hears one.
            self.ack_due = true;
            return Arrival::Duplicate;
        }
        if distance >= u16::from(self.free()) {
            return Arrival::Overrun;
        }
        if distance > 0 {
            self.missing(header.seq);
            return Arrival::OutOfOrder;
        }
        self.expected = self.expected.wrapping_add(1);
        self.gap = None;
        self.nak_due = false;
        self.unconsumed += 1;
        self.unacknowledged = self.unacknowledged.saturating_add(1);
        if header.last || self.unacknowledged >= self.ack_every {
            self.ack_due = true;
        }
        Arrival::InOrder
    }

    /// A broken sequenced frame whose header can be trusted.
    pub fn broken(&mut self, header: &Header) {
        let distance = header.seq.wrapping_sub(self.expected);
        if distance == 0 {
            // The very frame that is missing, perhaps in a replay: nothing else will show it.
            self.ask(header.seq);
        } else if distance < u16::from(self.free()) {
            self.missing(header.seq);
        }
    }

    /// Something broken of which nothing is known. Inside a gap it says nothing: if it was the
    /// replay, the sequence numbers that follow show it.
    pub fn garbage(&mut self) {
        if self.gap.is_none() {
            self.ask(self.expected);
        }
    }

    /// A frame behind the missing one. Numbers rise while frames sent before the request arrive;
    /// one that does not rise belongs to a replay whose beginning was lost too.
    fn missing(&mut self, seq: u16) {
        let offset = |seq: u16| seq.wrapping_sub(self.expected);
        match self.gap {
            Some(high) if offset(seq) > offset(high) => {
                self.gap = Some(seq);
                // The same request again: the first may have been lost.
                self.nak_due = true;
            }
            _ => self.ask(seq),
        }
    }

    fn ask(&mut self, seen: u16) {
        self.gap = Some(seen);
        self.nak_due = true;
        self.request = self.request.wrapping_add(1);
    }

    /// The caller has freed buffer. The peer hears of it when that is worth a frame.
    pub fn consumed(&mut self, frames: usize) {
        self.unconsumed = self.unconsumed.saturating_sub(frames);
        let news = self.limit().wrapping_sub(self.announced);
        if news >= u16::from(self.window / 4) {
            self.ack_due = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    fn data(seq: u16, last: bool) -> Header {
        Header { kind: Kind::Data, last, session: 0, length: 0, seq, ack: 0, credit: 0 }
    }

    /// The number of the request that is due.
    fn asked(receiver: &mut Receiver) -> Option<u16> {
        receiver.nak_due().then(|| receiver.asked())
    }

    #[test]
    fn gap_is_one_request_however_many_frames_follow_it() {
        let mut receiver = Receiver::new(64, 4);
        receiver.broken(&data(0, false));
        assert_eq!(asked(&mut receiver), Some(1));
        for seq in 1..4 {
            assert_eq!(receiver.arrive(&data(seq, false)), Arrival::OutOfOrder);
            assert_eq!(asked(&mut receiver), Some(1));
        }
        assert_eq!(receiver.arrive(&data(0, false)), Arrival::InOrder);
        assert_eq!(asked(&mut receiver), None);
    }

    #[test]
    fn replay_that_breaks_again_is_another_request() {
        let mut receiver = Receiver::new(64, 4);
        receiver.broken(&data(0, false));
        receiver.arrive(&data(1, false));
        assert_eq!(asked(&mut receiver), Some(1));
        receiver.broken(&data(0, false));
        assert_eq!(asked(&mut receiver), Some(2));
        receiver.arrive(&data(1, false));
        receiver.arrive(&data(2, false));
        assert_eq!(asked(&mut receiver), Some(2));
        // The header was broken too this time: the number after it falls back.
        receiver.garbage();
        assert_eq!(asked(&mut receiver), None);
        receiver.arrive(&data(1, false));
        assert_eq!(asked(&mut receiver), Some(3));
    }

    #[test]
    fn answer_is_due_every_fourth_frame_and_at_the_last() {
        let mut receiver = Receiver::new(64, 4);
        let due: Vec<bool> = (0..10)
            .map(|seq| {
                receiver.arrive(&data(seq, seq == 8));
                receiver.consumed(1);
                let due = receiver.ack_due();
                if due {
                    receiver.announced();
                }
                due
            })
            .collect();
        // The first one is early because no credit has been announced yet.
        assert!(due[8]);
        assert_eq!(due[1..8].iter().filter(|due| **due).count(), 1);
    }

    #[test]
    fn frame_without_room_is_an_overrun_until_buffer_is_freed() {
        let mut receiver = Receiver::new(8, 4);
        for seq in 0..8 {
            assert_eq!(receiver.arrive(&data(seq, false)), Arrival::InOrder);
        }
        assert_eq!(receiver.arrive(&data(8, false)), Arrival::Overrun);
        receiver.announced();
        receiver.consumed(1);
        assert!(!receiver.ack_due());
        receiver.consumed(1);
        assert!(receiver.ack_due());
        assert_eq!(receiver.limit(), 10);
        assert_eq!(receiver.arrive(&data(8, false)), Arrival::InOrder);
    }
}
