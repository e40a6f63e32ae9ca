// SPDX-License-Identifier: Apache-2.0
//! A link accepts any frame in any state without a panic, and its promises hold.

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

use spanker_link::{Config, Event, Header, Identity, Kind, Link, LinkState, TRAINING_BYTES};

/// What happens to a link: everything that a caller or a peer can do, sensible or not.
#[derive(Debug, Clone)]
enum Act {
    Train,
    Cut,
    Push(u16),
    Notify(u16),
    Transmit,
    Receive(Header, Vec<u8>),
    Answer { kind: Kind, back: u8, free: u8, seq: u8 },
    Connect,
    Corrupt(Option<Header>),
    Consumed(usize),
    Flush,
    Tick(u64),
}

fn headers() -> impl Strategy<Value = Header> {
    let kind = prop_oneof![
        Just(Kind::Train),
        Just(Kind::Data),
        Just(Kind::Notice),
        Just(Kind::Ack),
        Just(Kind::Nak)
    ];
    let numbers = (any::<u16>(), any::<u16>(), any::<u16>(), any::<u16>(), any::<u8>());
    (kind, any::<bool>(), numbers).prop_map(|(kind, last, (session, length, seq, ack, credit))| {
        Header { kind, last, session, length, seq, ack, credit }
    })
}

fn acts() -> impl Strategy<Value = Act> {
    let kind = prop_oneof![Just(Kind::Data), Just(Kind::Ack), Just(Kind::Nak)];
    prop_oneof![
        1 => Just(Act::Train),
        1 => Just(Act::Cut),
        8 => (0..3000u16).prop_map(Act::Push),
        2 => (0..3000u16).prop_map(Act::Notify),
        12 => Just(Act::Transmit),
        1 => (headers(), vec(any::<u8>(), 0..64)).prop_map(|(h, p)| Act::Receive(h, p)),
        12 => (kind, 0..8u8, any::<u8>(), 0..8u8)
            .prop_map(|(kind, back, free, seq)| Act::Answer { kind, back, free, seq }),
        6 => Just(Act::Connect),
        2 => proptest::option::of(headers()).prop_map(Act::Corrupt),
        2 => (0..200usize).prop_map(Act::Consumed),
        1 => Just(Act::Flush),
        4 => (0..1_000_000u64).prop_map(Act::Tick),
    ]
}

/// A link, what it last said of itself, and what its peer would know.
struct Bench {
    link: Link<u16>,
    now: u64,
    sent: u16,
    pushed: u64,
    back: u64,
}

impl Bench {
    fn act(&mut self, act: Act) -> Event {
        match act {
            Act::Train => self.link.train(self.now),
            Act::Cut => self.link.cut(),
            Act::Push(length) => self.pushed += u64::from(self.link.push(length, length).is_ok()),
            Act::Notify(length) => {
                self.pushed += u64::from(self.link.notify(length, length).is_ok());
            }
            Act::Transmit => {
                if let Some((header, _)) = self.link.transmit(self.now)
                    && matches!(header.kind, Kind::Data | Kind::Notice)
                {
                    self.sent = header.seq.wrapping_add(1);
                }
            }
            Act::Receive(header, payload) => {
                return self.link.receive(&header, &payload, self.now);
            }
            Act::Answer { kind, back, free, seq } => {
                let ack = self.sent.wrapping_sub(u16::from(back));
                let credit = (ack as u8).wrapping_add(free);
                let seq = u16::from(seq);
                let header =
                    Header { kind, last: free & 1 == 1, session: 9, length: 0, seq, ack, credit };
                return self.link.receive(&header, &[], self.now);
            }
            Act::Connect => return self.connect(),
            Act::Corrupt(header) => self.link.corrupt(header.as_ref(), self.now),
            Act::Consumed(frames) => self.link.consumed(frames),
            Act::Flush => self.link.flush_ack(),
            Act::Tick(ticks) => {
                self.now += ticks;
                return self.link.tick(self.now);
            }
        }
        Event::Nothing
    }

    /// A training frame of a peer with session 9 that has heard this end's session.
    fn connect(&mut self) -> Event {
        self.link.train(self.now);
        self.now += self.link.next_timer().map_or(0, |at| at.saturating_sub(self.now));
        let echo = self.link.transmit(self.now).and_then(|(_, body)| match body {
            spanker_link::Body::Training(bytes) => {
                Some([bytes[20], bytes[21], bytes[22], bytes[23]])
            }
            _ => None,
        });
        let mut hello = [0; TRAINING_BYTES];
        hello[..6].copy_from_slice(&[1, 0, 4, 64, 0, 8]);
        hello[8] = 2;
        hello[20] = 9;
        hello[24..28].copy_from_slice(&echo.unwrap_or_default());
        hello[28] = 1;
        let length = TRAINING_BYTES as u16;
        let header = Header {
            kind: Kind::Train,
            last: false,
            session: 9,
            length,
            seq: 0,
            ack: 0,
            credit: 64,
        };
        self.link.receive(&header, &hello, self.now)
    }

    fn collect_acked(&mut self) {
        while self.link.acked().is_some() {
            self.back += 1;
        }
        while self.link.dropped().is_some() {
            self.back += 1;
        }
    }
}

proptest! {
    #[test]
    fn link_accepts_anything_in_any_state(acts in vec(acts(), 0..300), window in 8..=120u8) {
        let identity = Identity { serial: 1, port: 0 };
        let config = Config { window, ..Config::nanoseconds(identity, 5) };
        let mut bench =
            Bench { link: Link::new(config), now: 0, sent: 0, pushed: 0, back: 0 };
        for act in [Act::Connect].into_iter().chain(acts) {
            let event = bench.act(act);
            bench.collect_acked();
            let state = bench.link.state();
            prop_assert_eq!(state == LinkState::Error, bench.link.fault().is_some());
            prop_assert!(event != Event::Deliver || state == LinkState::Up);
            prop_assert!(state == LinkState::Up || bench.link.free_slots() == 0);
            prop_assert!(bench.link.free_slots() <= 120);
            prop_assert!(bench.back <= bench.pushed);
        }
        // Whatever was queued comes back once: acknowledged or dropped.
        bench.link.cut();
        bench.collect_acked();
        prop_assert_eq!(bench.back, bench.pushed);
    }
}
