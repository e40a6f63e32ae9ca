// SPDX-License-Identifier: Apache-2.0
//! The control handle against cards of every minor version, and of another major version: what a card has not is
//! refused by name, and nothing of it reaches the card.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytemuck::bytes_of;
use nix::errno::Errno;
use spanker_runtime::abi::{ABI_VERSION_MINOR, RawVersion, Request};
use spanker_runtime::message::head_of;
use spanker_runtime::{
    AbiVersion, Activation, BufferId, Call, Descriptor, Error, Fault, FaultKind, Feature, KvCache,
    Picks, Place, Scores, SpankerControl, Ticket, Transport, Work,
};

/// A card of some version that answers everything, and keeps the names of what it was asked.
#[derive(Debug)]
struct Fake {
    version: AbiVersion,
    asked: Arc<Mutex<Vec<&'static str>>>,
}

impl Transport for Fake {
    fn call(&self, call: &mut Call<'_>) -> spanker_runtime::Result<()> {
        self.asked.lock().expect("no panic").push(call.name);
        if call.name == RawVersion::NAME {
            let AbiVersion { major, minor, patch } = self.version;
            let raw = RawVersion { major, minor, patch, reserved: 0 };
            call.argument.copy_from_slice(bytes_of(&raw));
        }
        Ok(())
    }
}

fn fake(major: u16, minor: u16) -> (SpankerControl, Arc<Mutex<Vec<&'static str>>>) {
    let asked = Arc::default();
    let version = AbiVersion { major, minor, patch: 5 };
    (SpankerControl::over(Box::new(Fake { version, asked: Arc::clone(&asked) })), asked)
}

/// Every request that came after the first version, with its name and whether it was made.
fn requests(card: &SpankerControl) -> Vec<(&'static str, spanker_runtime::Result<()>)> {
    let (buffer, ticket) = (BufferId(1), Ticket(0));
    let fault = Fault { kind: FaultKind::Aborted, card: 1, peer: 0, job: 1 };
    vec![
        ("CARD_INFO", card.info().map(drop)),
        ("PORT_INFO", card.port(0).map(drop)),
        ("ALLOCATE", card.allocate(1).map(drop)),
        ("FREE", card.free(buffer)),
        ("WRITE", card.write(buffer, 0, &[1])),
        ("READ", card.read(buffer, 0, &mut [1])),
        ("SUBMIT", card.submit(1, &[]).map(drop)),
        ("WAIT", card.wait(ticket, Duration::ZERO).map(drop)),
        ("COUNTERS", card.counters().map(drop)),
        ("RESET", card.abort(fault)),
        ("STATE", card.state(Duration::ZERO).map(drop)),
        ("RECORDS", card.records().map(drop)),
    ]
}

/// One piece of work of every kind, with the name of its kind and the minor version that brought it.
fn kinds() -> Vec<(&'static str, u16, Work)> {
    let at = Place { buffer: BufferId(1), offset: 0 };
    let (from, into, data, table) = (at, at, at, at);
    let (a, b, out, ids, weight) = (at, at, at, at, at);
    let (rows, width, quant, length) = (1, 256, 8, 4);
    let fold = spanker_runtime::Fold { dtype: 0, op: 0 };
    let (heads, head_size, kv_heads, group) = (1, 2, 1, 1);
    let matmul = |types| Work::Matmul { a, b, out, shape: [1, 256, 1], types };
    let landing = spanker_runtime::Landing::Store;
    let gate = |activation| Work::Gate { gate: at, up: at, into, elements: 1, activation };
    let mut kinds = vec![
        ("COPY", 2, Work::Copy { from, into, length }),
        ("FILL", 2, Work::Fill { into, length, pattern: 0 }),
        ("REDUCE", 2, Work::Reduce { into, sources: vec![at], elements: 1, fold, divisor: 0 }),
        ("MATMUL", 2, matmul([12, 12])),
        ("SEND", 2, Work::Send { from, length, port: 0, tag: 0 }),
        ("RECEIVE", 2, Work::Receive { into, length, port: 0, tag: 0, landing }),
        ("FENCE", 2, Work::Fence { not_before_ps: 0 }),
        ("EMBED", 3, Work::Embed { table, ids, into, rows, width, quant, first: 0, count: 1 }),
        ("NORM", 3, Work::Norm { from, weight, into, rows, width, epsilon: 0 }),
        ("QUANTIZE", 3, Work::Quantize { from, into, rows, width, quant }),
        ("ROTATE", 3, Work::Rotate { data, table, rows, heads, head_size, dims: 2, pairs: 0 }),
        ("HALVE", 3, Work::Halve { from, into, elements: 1 }),
        (
            "ATTEND",
            3,
            Work::Attend {
                queries: at,
                keys: at,
                values: at,
                into,
                rows,
                heads,
                kv_heads,
                head_size,
                group,
                offset: 0,
                past: 0,
                scale: 0,
            },
        ),
        ("GATE", 3, gate(Activation::Silu)),
        ("ROWS", 3, Work::Rows { from, into, rows, length, from_stride: 4, into_stride: 4 }),
        ("BEST", 3, Work::Best { from, into, count: 1, k: 1, first: 0 }),
        ("MATMUL of other types than Q4_K by Q4_K", 3, matmul([15, 12])),
    ];
    kinds.push(("ACTIVATE", 5, gate(Activation::Gelu)));
    kinds.extend(newer_kinds(at));
    kinds
}

/// The kinds that steps of many sequences need.
fn newer_kinds(at: Place) -> Vec<(&'static str, u16, Work)> {
    let (into, keys, values, queries, data) = (at, at, at, at, at);
    let (rows, heads, head_size) = (1, 1, 2);
    let cache = KvCache {
        blocks: at,
        count: 1,
        rows: at,
        tables: at,
        entries: 1,
        heads,
        head_size,
        quant: 1,
    };
    let rotate = Work::RotateRows {
        data,
        table: at,
        positions: 1,
        at,
        rows,
        heads,
        head_size,
        dims: 2,
        pairs: 0,
    };
    let (group, offset) = (1, 0);
    let attend = |window| {
        let scores = Scores { window, ..Scores::plain(0) };
        Work::AttendBlocks { queries, cache, into, rows, heads, group, offset, scores }
    };
    let picks = Picks { at, used: 1, experts: 1 };
    let (a, b, out, shape, types) = (at, at, at, [1, 32, 1], [8, 8]);
    let experts = Work::MatmulExperts { a, b, out, picks, shape, types, stride: 34, apart: false };
    vec![
        ("WRITE", 4, Work::Write { into, bytes: Arc::from([0; 4]) }),
        ("ADD_ROW", 4, Work::AddRow { into, row: at, rows, width: 1 }),
        ("ROTATE_ROWS", 4, rotate),
        ("KEEP", 4, Work::Keep { keys, values, cache, rows }),
        ("ATTEND_BLOCKS", 4, attend(0)),
        ("ROUTE", 5, Work::Route { logits: at, picks, rows, gating: 1 }),
        ("MATMUL_EXPERTS", 5, experts),
        ("COMBINE", 5, Work::Combine { from: at, picks, into, rows, width: 1, add: false }),
        (
            "ADD_PICKED",
            5,
            Work::AddPicked { into, table: at, picks, rows, width: 1, stride: 4, weighed: true },
        ),
        (
            "KEEP and ATTEND_BLOCKS of Q4_0",
            5,
            Work::Keep { keys, values, cache: KvCache { quant: 2, ..cache }, rows },
        ),
        ("SCALE", 5, Work::Scale { data, elements: 1, factor: 0, cap: 0 }),
        ("ATTEND_SCORES", 5, attend(9)),
    ]
}

#[test]
fn requests_to_cards_of_every_minor_version_are_made_only_if_the_card_has_them() {
    for minor in 0..=ABI_VERSION_MINOR + 1 {
        let (card, asked) = fake(0, minor);
        for (name, made) in requests(&card) {
            let sent = asked.lock().expect("no panic").contains(&name);
            assert_eq!(sent, minor >= 2, "0.{minor}: {name}");
            match made {
                Ok(()) => assert!(minor >= 2, "0.{minor}: {name}"),
                Err(error) => {
                    let expected =
                        format!("request {name} needs ABI 0.2.0, the card speaks 0.{minor}.5");
                    assert_eq!(error.to_string(), expected);
                }
            }
        }
        card.ping().expect("every card answers this");
        let asked = asked.lock().expect("no panic");
        assert_eq!(asked.iter().filter(|name| **name == "GET_VERSION").count(), 1, "0.{minor}");
    }
}

#[test]
fn work_for_cards_of_every_minor_version_is_submitted_only_if_the_card_has_its_kind() {
    for minor in 2..=ABI_VERSION_MINOR + 1 {
        for (name, since, work) in kinds() {
            let (card, asked) = fake(0, minor);
            let fence: Descriptor = Work::Fence { not_before_ps: 0 }.into();
            let made = card.submit(1, &[fence, work.into()]);
            let sent = asked.lock().expect("no panic").contains(&"SUBMIT");
            assert_eq!((made.is_ok(), sent), (minor >= since, minor >= since), "0.{minor}: {name}");
            let Err(error) = made else { continue };
            let expected =
                format!("work {name} needs ABI 0.{since}.0, the card speaks 0.{minor}.5");
            assert_eq!(error.to_string(), expected);
        }
    }
}

#[test]
fn every_kind_of_work_has_a_feature_of_its_own() {
    let mut found: Vec<Feature> =
        kinds().iter().map(|(_, _, work)| Feature::of_work(work).expect("a feature")).collect();
    found.sort();
    let work = |feature: &&Feature| feature.name().starts_with("work ");
    let all: Vec<Feature> = Feature::ALL.iter().filter(work).copied().collect();
    assert_eq!(found, all);
}

#[test]
fn supports_and_require_answer_from_the_table_for_every_minor_version() {
    for minor in 0..=ABI_VERSION_MINOR + 1 {
        let (card, _) = fake(0, minor);
        for &feature in Feature::ALL {
            let has = minor >= feature.since();
            assert_eq!(card.supports(feature).expect("an answer"), has, "0.{minor}: {feature}");
            match card.require(feature) {
                Ok(()) => assert!(has, "0.{minor}: {feature}"),
                Err(Error::Unsupported { feature: named, theirs }) => {
                    assert_eq!((named, theirs.minor, has), (feature, minor, false));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn card_of_another_major_version_is_refused_by_name_and_still_says_its_version() {
    let (card, asked) = fake(1, 0);
    for (name, made) in requests(&card) {
        let error = made.expect_err("another major version");
        assert_eq!(error.to_string(), "the card speaks ABI 1.0.5, this program 0.5.0", "{name}");
    }
    let error = card.supports(Feature::CardInfo).expect_err("another major version");
    assert!(matches!(error, Error::Version { .. }), "{error}");
    card.ping().expect("every card answers this");
    assert_eq!(card.version().expect("an answer").major, 1);
    let asked = asked.lock().expect("no panic");
    assert!(asked.iter().all(|name| ["GET_VERSION", "PING"].contains(name)), "{asked:?}");
}

/// A socket on which a card of some version refuses the first request that comes.
fn refusing(version: AbiVersion, error: Errno) -> SpankerControl {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("spanker0");
    let listener = UnixListener::bind(&path).expect("a socket");
    let card = SpankerControl::open_path(&path).expect("a card");
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a program");
        // GET_VERSION carries 8 bytes.
        let mut request = [0; 40];
        stream.read_exact(&mut request).expect("a request");
        let answer = head_of(version, RawVersion::NUMBER, error as i32, 1, 0, 0);
        stream.write_all(&answer).expect("a program that reads");
    });
    card
}

#[test]
fn card_behind_a_socket_that_refuses_our_major_version_is_named_by_its_own() {
    let theirs = AbiVersion { major: 3, minor: 1, patch: 0 };
    let error = refusing(theirs, Errno::EPROTONOSUPPORT).info().expect_err("another version");
    assert_eq!(error.to_string(), "the card speaks ABI 3.1.0, this program 0.5.0");
    // A refusal for another reason is not about the version, whoever says so.
    let error = refusing(theirs, Errno::EIO).info().expect_err("a refusal");
    assert!(matches!(error, Error::Ioctl { source: Errno::EIO, .. }), "{error}");
    let error = refusing(AbiVersion::OURS, Errno::EPROTONOSUPPORT).info().expect_err("a refusal");
    assert!(matches!(error, Error::Ioctl { source: Errno::EPROTONOSUPPORT, .. }), "{error}");
}
