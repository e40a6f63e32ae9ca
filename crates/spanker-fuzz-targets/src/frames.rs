// SPDX-License-Identifier: Apache-2.0
//! Frames: the decoder, a link in any state, and a card whose peer says whatever it likes in frames whose checks
//! are right.

use rand::Rng;
use rand_pcg::Pcg64Mcg;
use spanker_link::{
    Body, Config, Decoded, Event, Header, Identity, Kind, Link, LinkState, MAX_PAYLOAD, decode,
    encode,
};
use spanker_runtime::abi::RawSubmit;
use spanker_runtime::{BufferId, Fold, Landing, Place, Work, encode_work};

use crate::pair::{Guarded, HOSTILE, SentFrames, pace};
use crate::script::Script;

/// Runs an input: which of the three, and the bytes.
pub fn run(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    match script.byte() % 4 {
        0 => decode_all(script.left),
        1 => drive_link(&mut script),
        _ => fuzz_card(&mut script),
    }
}

/// Every byte of a stream is part of a frame or of garbage, and the search ends.
fn decode_all(mut bytes: &[u8]) {
    loop {
        match decode(bytes) {
            Decoded::Frame { header, payload, used } => {
                assert_eq!(usize::from(header.length), payload.len());
                assert!(used >= 16 && used <= bytes.len());
                bytes = &bytes[used..];
            }
            Decoded::Corrupt { skip, .. } => {
                assert!(skip >= 1 && skip <= bytes.len());
                bytes = &bytes[skip..];
            }
            Decoded::Incomplete { need } => {
                assert!(need > bytes.len() && need <= MAX_PAYLOAD + 24);
                return;
            }
        }
    }
}

fn kind(number: u8) -> Kind {
    [Kind::Train, Kind::Data, Kind::Notice, Kind::Ack, Kind::Nak][usize::from(number % 5)]
}

/// A frame with these fields and right checks.
fn frame(script: &mut Script<'_>, session: Option<u16>) -> (Header, Vec<u8>) {
    let kind = kind(script.byte());
    let length = if kind.is_control() { 0 } else { usize::from(script.byte()) };
    let header = Header {
        kind,
        last: script.byte() & 1 == 1,
        session: session.unwrap_or_else(|| script.short()),
        length: length as u16,
        seq: u16::from(script.byte()),
        ack: u16::from(script.byte()),
        credit: script.byte(),
    };
    let mut payload = script.take(length).to_vec();
    payload.resize(length, 0);
    (header, payload)
}

/// Two links; the script is everything that callers and peers can do to the first.
fn drive_link(script: &mut Script<'_>) {
    let config = |serial| Config::nanoseconds(Identity { serial, port: 0 }, 5);
    let window = 8 + script.byte() % 113;
    let mut link: Link<Vec<u8>> = Link::new(Config { window, ..config(1) });
    let mut peer: Link<Vec<u8>> = Link::new(config(2));
    let (mut now, mut session, mut pushed, mut back) = (0, None, 0, 0);
    link.train(now);
    peer.train(now);
    for _ in 0..400 {
        if script.left.is_empty() {
            break;
        }
        let event = match script.byte() % 12 {
            0 => {
                link.train(now);
                Event::Nothing
            }
            1 => {
                link.cut();
                Event::Nothing
            }
            2 | 3 => {
                let payload = vec![1; usize::from(script.byte())];
                let length = payload.len() as u16;
                let notice = script.byte() & 3 == 0;
                let accepted =
                    if notice { link.notify(payload, length) } else { link.push(payload, length) };
                pushed += u64::from(accepted.is_ok());
                Event::Nothing
            }
            4..=6 => {
                let _ = cross(&mut link, &mut peer, now);
                let (header, event) = cross(&mut peer, &mut link, now);
                session = header.map(|header| header.session).or(session);
                event
            }
            7 => {
                link.consumed(usize::from(script.byte()));
                link.flush_ack();
                Event::Nothing
            }
            8 => {
                let (header, _) = frame(script, session);
                link.corrupt((header.seq & 1 == 0).then_some(&header), now);
                Event::Nothing
            }
            9 => {
                now += u64::from(script.word() >> 8);
                link.tick(now)
            }
            _ => {
                let (header, payload) = frame(script, session);
                link.receive(&header, &payload, now)
            }
        };
        while link.acked().or_else(|| link.dropped()).is_some() {
            back += 1;
        }
        let state = link.state();
        assert_eq!(state == LinkState::Error, link.fault().is_some());
        assert!(event != Event::Deliver || state == LinkState::Up);
        assert!(state == LinkState::Up || link.free_slots() == 0);
    }
    link.cut();
    while link.acked().or_else(|| link.dropped()).is_some() {
        back += 1;
    }
    assert_eq!(back, pushed, "what was queued comes back once");
}

/// Carries one frame over, if there is one.
fn cross(from: &mut Link<Vec<u8>>, to: &mut Link<Vec<u8>>, now: u64) -> (Option<Header>, Event) {
    let Some((header, body)) = from.transmit(now) else { return (None, Event::Nothing) };
    let event = match body {
        Body::Empty => to.receive(&header, &[], now),
        Body::Training(bytes) => to.receive(&header, &bytes, now),
        Body::Payload(bytes) => to.receive(&header, bytes, now),
    };
    (Some(header), event)
}

/// A peer made of a script and a link that knows the protocol.
struct Peer {
    link: Link<Vec<u8>>,
    session: Option<u16>,
    /// Bytes of the messages that the card expects, by job.
    lengths: [u64; 2],
    /// The stamp of what it sends.
    stamp: u64,
    /// A bit of the next frame that flips.
    flip: Option<u16>,
}

impl Peer {
    fn send(&mut self, end: &mut Guarded) {
        for _ in 0..8 {
            let Some((header, body)) = self.link.transmit(end.now) else { return };
            self.session = Some(header.session);
            let mut bytes = Vec::new();
            match body {
                Body::Empty => encode(&header, &[], &mut bytes),
                Body::Training(hello) => encode(&header, &[&hello], &mut bytes),
                Body::Payload(payload) => encode(&header, &[payload], &mut bytes),
            }
            if let Some(bit) = self.flip.take() {
                let at = usize::from(bit >> 3) % bytes.len();
                bytes[at] ^= 1 << (bit & 7);
            }
            end.card.arrived(0, self.stamp, &bytes);
        }
    }

    fn hear(&mut self, sent: &mut SentFrames, now: u64) {
        for (_, bytes) in std::mem::take(&mut sent.frames) {
            if let Decoded::Frame { header, payload, .. } = decode(&bytes)
                && self.link.receive(&header, payload, now) == Event::Deliver
            {
                self.link.consumed(1);
            }
        }
        while self.link.acked().or_else(|| self.link.dropped()).is_some() {}
    }

    /// One thing that it does.
    fn act(&mut self, script: &mut Script<'_>, end: &mut Guarded) {
        match script.byte() % 8 {
            // A message's head and the first of its bytes.
            0 | 1 => {
                let (odd, length) = (script.byte(), u64::from(script.byte()));
                let part = usize::from(script.byte());
                // Mostly what a receive expects.
                let (index, tag) = (odd & 1, u64::from(odd >= 250));
                let length = if odd < 220 { self.lengths[usize::from(index)] } else { length };
                let job = 1 + u64::from(index);
                let mut payload = [job, tag, length].map(u64::to_le_bytes).concat();
                payload.resize(24 + part, 7);
                let length = payload.len() as u16;
                let _ = self.link.push(payload, length);
            }
            2 => {
                let payload = vec![5; usize::from(script.byte())];
                let length = payload.len() as u16;
                let _ = self.link.push(payload, length);
            }
            3 => {
                let job = u64::from(script.byte() % 3);
                let words = [job, script.byte().into(), script.long(), script.long()];
                let payload = words.map(u64::to_le_bytes).concat();
                let kept = payload.len() - usize::from(script.byte() % 3);
                let _ = self.link.notify(payload[..kept].to_vec(), kept as u16);
            }
            4 => {
                let (header, payload) = frame(script, self.session);
                let mut bytes = Vec::new();
                encode(&header, &[&payload], &mut bytes);
                end.card.arrived(0, self.stamp, &bytes);
            }
            5 => self.flip = Some(script.short()),
            6 => self.stamp = script.long(),
            _ => end.now += u64::from(script.word() >> 4),
        }
    }
}

/// A card that receives and sends at a port whose peer is a script.
fn fuzz_card(script: &mut Script<'_>) {
    let mut end = Guarded::new(pace(script.byte()), 0);
    let payload = 1 + script.short() % MAX_PAYLOAD as u16;
    let payload = if script.byte() & 3 == 0 { payload } else { 2072 };
    let config = Config { payload, ..Config::nanoseconds(Identity { serial: 77, port: 0 }, 3) };
    let lengths = submit(&mut end, script);
    let mut peer = Peer { link: Link::new(config), session: None, lengths, stamp: 0, flip: None };
    peer.link.train(0);
    let mut sent = SentFrames::default();
    for turn in 0..120 {
        if script.left.is_empty() && turn > 8 {
            break;
        }
        if turn > 4 {
            peer.act(script, &mut end);
        }
        peer.send(&mut end);
        end.now += 20_000;
        end.card.advance(end.now);
        end.card.depart(0, &mut sent);
        peer.hear(&mut sent, end.now);
        peer.link.tick(end.now);
        end.drop_replies();
    }
    end.check();
}

/// Receives of both jobs that the peer knows, and sends between them. Returns the lengths of the messages.
fn submit(end: &mut Guarded, script: &mut Script<'_>) -> [u64; 2] {
    let buffer = BufferId(end.allocate(HOSTILE, 512));
    let at = Place { buffer, offset: 0 };
    [1, 2].map(|job| {
        let fold = Fold { dtype: u16::from(script.byte() % 8), op: 0 };
        let length = u64::from(script.byte() & !7);
        let receive = |landing| Work::Receive { into: at, length, port: 0, tag: 0, landing };
        let work = [
            receive(Landing::FoldFirst(fold)).into(),
            receive(Landing::Store).into(),
            Work::Send { from: at, length, port: 0, tag: 0 }.into(),
            Work::Fence { not_before_ps: 0 }.into(),
            receive(Landing::FoldSecond(fold)).into(),
        ];
        let bytes = encode_work(&work);
        let request = RawSubmit { address: 0, length: bytes.len() as u64, job, ticket: 0 };
        let (status, ..) = end.ask(HOSTILE, request, &bytes);
        assert_eq!(status, 0);
        length
    })
}

/// A stream of frames, or a script.
pub fn valid(dice: &mut Pcg64Mcg) -> Vec<u8> {
    let mode: u8 = dice.random_range(0..4);
    let mut out = vec![mode];
    if mode == 0 {
        for _ in 0..dice.random_range(1..5) {
            let fields: Vec<u8> = (0..40).map(|_| dice.random()).collect();
            let (header, payload) = frame(&mut Script::new(&fields), None);
            encode(&header, &[&payload], &mut out);
        }
        return out;
    }
    let length = dice.random_range(8..160);
    out.extend((0..length).map(|_| dice.random::<u8>()));
    out
}
