// SPDX-License-Identifier: Apache-2.0
//! Emulated cards that speak other versions of the ABI than this crate's: what they refuse when a program asks all the
//! same, and what programs that look at the version make of them, alone and in a ring with others.

use std::collections::BTreeSet;

use nix::errno::Errno;
use spanker_runtime::abi::{
    self, ABI_VERSION_MINOR, Counters, RawAccess, RawAllocate, RawCardInfo, RawFree, RawPortInfo,
    RawRead, RawRecords, RawReset, RawState, RawSubmit, RawVersion, RawWait, Request,
};
use spanker_runtime::message::{HEAD_BYTES, Message};
use spanker_runtime::{
    AbiVersion, BufferId, Error, Feature, Fold, Place, SpankerControl, Work, encode_work,
};
use spanker_scheduler::{AllReduce, LinkState, ReduceOp, Topology};
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Card, CardSpec, ClientId, Pace, World, specs};

/// Every minor version, and one that does not exist yet.
fn minors() -> impl Iterator<Item = u16> {
    0..=ABI_VERSION_MINOR + 1
}

fn version(minor: u16) -> AbiVersion {
    AbiVersion { major: 0, minor, patch: 0 }
}

/// A ring of cards of these versions.
fn cards(versions: &[AbiVersion]) -> Vec<CardSpec> {
    let profile = Profile::builtin("rev-a").unwrap();
    let cluster = Cluster::uniform(profile, versions.len(), Shape::Ring).unwrap();
    let mut cards = specs(&cluster, Pace::Card, 1).unwrap();
    cards.iter_mut().zip(versions).for_each(|(card, &version)| card.abi = version);
    cards
}

/// What a card answers to a request that a program makes without a look at the version: the head.
fn answer(spec: &CardSpec, number: u32, argument: &[u8], payload: &[u8]) -> abi::RawMessage {
    let mut card = Card::new(spec.clone(), 1, 0);
    let client = ClientId(1);
    card.connect(client, 1);
    // Work and waits ask for a ticket that there is, and access for a buffer.
    let allocate = RawAllocate { length: 1 << 16, buffer: 0 };
    if spec.abi.has(Feature::Allocate) {
        ask(&mut card, client, RawAllocate::NUMBER, bytemuck::bytes_of(&allocate), &[]);
    }
    ask(&mut card, client, number, argument, payload)
}

fn ask(
    card: &mut Card,
    client: ClientId,
    number: u32,
    argument: &[u8],
    payload: &[u8],
) -> abi::RawMessage {
    let used = HEAD_BYTES + argument.len() + payload.len();
    card.request(client, &Message { number, sequence: 1, argument, payload, used }, 0);
    for now in 1..1000 {
        card.advance(now);
        if let Some(reply) = card.reply() {
            return bytemuck::pod_read_unaligned(&reply.bytes[..HEAD_BYTES]);
        }
    }
    panic!("no answer to {number:x}");
}

/// Every request of the ABI by its name, with the bytes of a struct that the card accepts or refuses for what is in it.
fn requests() -> Vec<(&'static str, u32, Vec<u8>)> {
    fn blank<R: Request>() -> (&'static str, u32, Vec<u8>) {
        (R::NAME, R::NUMBER, vec![0; size_of::<R>()])
    }
    vec![
        blank::<abi::Ping>(),
        blank::<RawVersion>(),
        blank::<RawCardInfo>(),
        blank::<RawPortInfo>(),
        blank::<RawAllocate>(),
        blank::<RawFree>(),
        blank::<RawAccess>(),
        blank::<RawRead>(),
        blank::<RawSubmit>(),
        blank::<RawWait>(),
        blank::<Counters>(),
        blank::<RawReset>(),
        blank::<RawState>(),
        blank::<RawRecords>(),
    ]
}

#[test]
fn card_answers_enotty_to_requests_that_came_after_its_version_and_tells_its_version_in_every_head()
{
    let first: BTreeSet<&str> = ["PING", "GET_VERSION"].into();
    for minor in minors() {
        let spec = &cards(&[version(minor)])[0];
        for (name, number, argument) in requests() {
            let head = answer(spec, number, &argument, &[]);
            let unknown = head.status == Errno::ENOTTY as i32;
            assert_eq!(unknown, minor < 2 && !first.contains(name), "0.{minor}: {name}");
            assert_eq!((head.major, head.minor), (0, minor), "0.{minor}: {name}");
        }
    }
}

#[test]
fn card_of_another_major_version_answers_the_first_requests_only() {
    let spec = &cards(&[AbiVersion { major: 1, minor: 0, patch: 2 }])[0];
    for (name, number, argument) in requests() {
        let head = answer(spec, number, &argument, &[]);
        let first = matches!(name, "PING" | "GET_VERSION");
        let expected = if first { 0 } else { Errno::EPROTONOSUPPORT as i32 };
        assert_eq!((head.status, head.major), (expected, 1), "{name}");
    }
    let world = World::new(cards(&[AbiVersion { major: 1, minor: 0, patch: 2 }; 2]), 7);
    let card = world.control(0);
    assert_eq!(card.version().unwrap().to_string(), "1.0.2");
    let error = card.info().unwrap_err();
    assert_eq!(error.to_string(), "the card speaks ABI 1.0.2, this program 0.5.0");
    let error = Topology::of_cards(vec![world.control(0)]).unwrap_err();
    assert!(error.to_string().starts_with("card 0: the card speaks ABI 1.0.2"), "{error}");
}

/// Work that is new in 0.3, by kind and by the types of a product, in one buffer of 64 KiB.
fn newer_work(buffer: BufferId) -> [(Work, Errno); 3] {
    let at = |offset| Place { buffer, offset };
    let (x, y, z) = (at(0), at(16 << 10), at(32 << 10));
    let types = [15, 12];
    [
        (Work::Halve { from: x, into: z, elements: 4 }, Errno::EINVAL),
        (Work::Best { from: x, into: z, count: 4, k: 1, first: 0 }, Errno::EINVAL),
        (Work::Matmul { a: x, b: y, out: z, shape: [1, 256, 1], types }, Errno::EOPNOTSUPP),
    ]
}

#[test]
fn card_refuses_work_that_came_after_its_version_whether_the_program_looks_or_not() {
    for minor in 2..=ABI_VERSION_MINOR + 1 {
        let versions = [version(minor); 2];
        let spec = &cards(&versions)[0];
        let world = World::new(cards(&versions), 7);
        let card = world.control(0);
        let buffer = card.allocate(1 << 16).unwrap();
        for (work, errno) in newer_work(buffer) {
            // The first buffer that a card gives out has the number 1, on either of the two.
            let bytes = encode_work(&[work.clone().into()]);
            let submit = RawSubmit { length: bytes.len() as u64, job: 1, ..RawSubmit::default() };
            let head = answer(spec, RawSubmit::NUMBER, bytemuck::bytes_of(&submit), &bytes);
            let expected = if minor < 3 { errno as i32 } else { 0 };
            assert_eq!(head.status, expected, "0.{minor}: {work:?}");

            match card.submit(1, &[work.clone().into()]) {
                Ok(ticket) => drop(card.wait(ticket, std::time::Duration::from_secs(1)).unwrap()),
                Err(Error::Unsupported { feature, theirs }) => {
                    assert_eq!(
                        (feature, theirs),
                        (Feature::of_work(&work).unwrap(), version(minor))
                    );
                    assert!(minor < 3, "{feature}");
                }
                Err(error) => panic!("0.{minor}: {error}"),
            }
        }
    }
}

#[test]
fn work_of_the_first_version_with_work_runs_on_every_version_that_has_it() {
    for minor in 2..=ABI_VERSION_MINOR + 1 {
        let world = World::new(cards(&[version(minor); 2]), 7);
        let card = world.control(0);
        let buffer = card.allocate(64).unwrap();
        let at = |offset| Place { buffer, offset };
        let fold = Fold { dtype: abi::TYPE_U32, op: abi::OP_SUM };
        let sources = vec![at(0), at(16)];
        let work = [
            Work::Fill { into: at(0), length: 16, pattern: 7 }.into(),
            Work::Copy { from: at(0), into: at(16), length: 16 }.into(),
            Work::Reduce { into: at(32), sources, elements: 4, fold, divisor: 0 }.into(),
            Work::Fence { not_before_ps: 0 }.into(),
        ];
        let ticket = card.submit(1, &work).unwrap();
        card.wait(ticket, std::time::Duration::from_secs(1)).unwrap();
        let mut sum = [0; 4];
        card.read(buffer, 44, &mut sum).unwrap();
        assert_eq!(u32::from_le_bytes(sum), 14, "0.{minor}");
    }
}

fn topology(world: &World, count: usize) -> Topology<SpankerControl> {
    Topology::of_cards((0..count).map(|card| world.control(card)).collect()).unwrap()
}

#[test]
fn ring_of_every_minor_version_has_the_links_of_the_cards_that_can_tell() {
    // One card of each version from 0 on, so that cards 0 and 1 have no discovery.
    let versions: Vec<AbiVersion> = minors().map(version).collect();
    let world = World::new(cards(&versions), 7);
    let found = topology(&world, versions.len());
    let links: Vec<_> =
        found.links().iter().map(|link| (link.local_sail, link.remote_sail)).collect();
    let last = versions.len() - 1;
    let able: Vec<_> = (2..last).flat_map(|card| [(card, card + 1), (card + 1, card)]).collect();
    assert_eq!(links, able);
    assert!(found.links().iter().all(|link| link.state == LinkState::Up));
    let error = found.group().unwrap_err().to_string();
    assert_eq!(error, "card 0: request STATE needs ABI 0.2.0, the card speaks 0.0.0");
}

#[test]
fn collective_over_cards_of_different_minor_versions_has_the_right_sum() {
    let versions = [2, ABI_VERSION_MINOR + 1, ABI_VERSION_MINOR].map(version);
    let world = World::new(cards(&versions), 7);
    let found = topology(&world, versions.len());
    let mut buffers: Vec<Vec<f32>> = (0..3).map(|card| vec![card as f32 + 1.0; 1000]).collect();
    found.all_reduce_f32(&mut buffers, ReduceOp::Sum).unwrap();
    assert!(buffers.iter().flatten().all(|&sum| sum == 6.0));
}
