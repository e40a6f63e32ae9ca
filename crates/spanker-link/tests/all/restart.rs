// SPDX-License-Identifier: Apache-2.0
//! Ends that restart, lose their signal and train at any moment, over a wire with late frames.

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

use spanker_link::{Body, Config, Event, Header, Identity, Link, LinkState};

/// The longest that a frame is on the wire.
const LATE: u64 = 30_000;
/// Time between two polls of the link.
const STEP: u64 = 1_000;

/// A payload: which stream it belongs to and its place there.
type Item = (u32, u32);

struct End {
    link: Link<Item>,
    /// The stream that this end sends, counted over both ends and all restarts.
    stream: u32,
    next: u32,
    acked: u32,
    /// The stream that this end hears and the next place in it.
    heard: Option<Item>,
    /// The last stream heard before.
    before: u32,
}

struct Bench {
    seed: u64,
    rng: Pcg64Mcg,
    now: u64,
    ends: [End; 2],
    wire: Vec<(u64, usize, Header, Vec<u8>)>,
    streams: u32,
    delivered: u64,
    resumed: u64,
    /// How far each stream was heard.
    reached: Vec<u32>,
}

fn config(side: usize, nonce: u32) -> Config {
    let identity = Identity { serial: side as u64, port: 0 };
    Config { retry: 80_000, ..Config::nanoseconds(identity, nonce) }
}

impl Bench {
    fn new(seed: u64) -> Bench {
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let ends = [0, 1].map(|side| End {
            link: Link::new(config(side, rng.random())),
            stream: 0,
            next: 0,
            acked: 0,
            heard: None,
            before: 0,
        });
        let wire = Vec::new();
        Bench {
            seed,
            rng,
            now: 0,
            ends,
            wire,
            streams: 0,
            delivered: 0,
            resumed: 0,
            reached: vec![0],
        }
    }

    fn disturb(&mut self) {
        let side = self.rng.random_range(0..2);
        let end = &mut self.ends[side];
        match self.rng.random_range(0..3) {
            0 => end.link = Link::new(config(side, self.rng.random())),
            1 => end.link.cut(),
            _ => {}
        }
        end.link.train(self.now);
    }

    fn step(&mut self) {
        self.now += STEP;
        for side in 0..2 {
            let event = self.ends[side].link.tick(self.now);
            self.note(side, event);
            self.speak(side);
        }
        let now = self.now;
        let mut arrived: Vec<_> = self.wire.extract_if(.., |frame| frame.0 <= now).collect();
        arrived.sort_by_key(|frame| frame.0);
        for (_, side, header, payload) in arrived {
            let event = self.ends[side].link.receive(&header, &payload, self.now);
            self.note(side, event);
            if event == Event::Deliver {
                self.deliver(side, &payload);
            }
        }
        for side in 0..2 {
            self.collect_acked(side);
        }
    }

    fn speak(&mut self, side: usize) {
        let end = &mut self.ends[side];
        while end.link.push((end.stream, end.next), 8).is_ok() {
            end.next += 1;
        }
        for _ in 0..4 {
            let Some((header, body)) = end.link.transmit(self.now) else { return };
            let payload = match body {
                Body::Empty => Vec::new(),
                Body::Training(bytes) => bytes.to_vec(),
                Body::Payload((stream, place)) => {
                    [stream.to_le_bytes(), place.to_le_bytes()].concat()
                }
            };
            // Most frames keep their order; some are late, some are lost, some come twice.
            let late = if self.rng.random_bool(0.05) { LATE } else { 500 };
            for _ in 0..[1, 1, 1, 1, 1, 1, 1, 1, 2, 0][self.rng.random_range(0..10)] {
                let at = self.now + 500 + self.rng.random_range(0..late);
                self.wire.push((at, 1 - side, header, payload.clone()));
            }
        }
    }

    fn note(&mut self, side: usize, event: Event) {
        match event {
            Event::Trained { resumed: true, .. } => self.resumed += 1,
            Event::Trained { resumed: false, .. } => {
                self.streams += 1;
                self.reached.push(0);
                let end = &mut self.ends[side];
                while end.link.acked().is_some() || end.link.dropped().is_some() {}
                (end.stream, end.next, end.acked) = (self.streams, 0, 0);
                end.before = end.heard.map_or(end.before, |(stream, _)| stream);
                end.heard = None;
            }
            Event::Faulted(fault) => panic!("seed {}: {fault:?}", self.seed),
            _ => {}
        }
    }

    fn deliver(&mut self, side: usize, payload: &[u8]) {
        let word = |at: usize| u32::from_le_bytes(payload[at..at + 4].try_into().expect("a word"));
        let (stream, place) = (word(0), word(4));
        let end = &mut self.ends[side];
        match end.heard {
            Some(expected) => assert_eq!((stream, place), expected, "seed {}", self.seed),
            None => {
                assert_eq!(place, 0, "seed {}", self.seed);
                assert!(stream > end.before, "seed {}: {stream} came again", self.seed);
            }
        }
        end.heard = Some((stream, place + 1));
        end.link.consumed(1);
        self.reached[stream as usize] = place + 1;
        self.delivered += 1;
    }

    /// What is acknowledged was delivered.
    fn collect_acked(&mut self, side: usize) {
        let end = &mut self.ends[side];
        while let Some((stream, place)) = end.link.acked() {
            assert_eq!((stream, place), (end.stream, end.acked), "seed {}", self.seed);
            end.acked += 1;
            assert!(end.acked <= self.reached[stream as usize], "seed {}", self.seed);
        }
    }
}

#[test]
fn streams_over_restarts_begin_at_their_beginning_and_have_no_holes() {
    let (mut delivered, mut streams, mut resumed) = (0, 0, 0);
    for seed in 0..60 {
        let mut bench = Bench::new(seed);
        bench.ends.iter_mut().for_each(|end| end.link.train(0));
        for _ in 0..20 {
            for _ in 0..bench.rng.random_range(1..300) {
                bench.step();
            }
            bench.disturb();
        }
        // Left alone, the link comes up again and carries data.
        (0..300).for_each(|_| bench.step());
        assert!(bench.ends.iter().all(|end| end.link.state() == LinkState::Up), "seed {seed}");
        let before = bench.delivered;
        (0..300).for_each(|_| bench.step());
        assert!(bench.delivered > before, "seed {seed}");
        delivered += bench.delivered;
        streams += bench.streams;
        resumed += bench.resumed;
    }
    println!("{delivered} frames in {streams} streams, {resumed} times resumed");
    assert!(
        delivered > 50_000 && streams > 500 && resumed > 200,
        "{delivered} {streams} {resumed}"
    );
}
