// SPDX-License-Identifier: Apache-2.0
//! Products of Q4_K matrices on one card: the bits of the host, and failures that leave the output as it was.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ggml_spanker::{DeviceFault, Error, HostMatmul, MatmulInt4, OUTPUT_ELEM_BYTES, QK_K};
use nix::errno::Errno;
use spanker_engine::jobs::{CardMatmul, CardProduct, JobError, Product};
use spanker_fabric::device::Deadline;
use spanker_runtime::{ABI_VERSION_MINOR, Call, Error as CardError, SpankerControl, Transport};
use spanker_steal::Backend;
use spanker_twin::{Disturbance, Pace, World};

use super::lone::Lone;
use super::{DEADLINE, occupy, world, world_of};

const SHAPES: [[usize; 3]; 3] = [[1, 256, 1], [3, 512, 7], [64, 2048, 33]];

fn on_card(card: SpankerControl) -> CardMatmul {
    CardMatmul::new(card, DEADLINE).expect("a card")
}

/// Operands whose blocks decode to finite numbers of many sizes.
fn operands([m, k, n]: [usize; 3]) -> (Vec<u8>, Vec<u8>) {
    let mut state = (m * 31 + k * 7 + n) as u32;
    let mut blocks = |rows: usize| {
        let mut bytes = vec![0; rows * k / QK_K * 144];
        for byte in &mut bytes {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
        for block in bytes.chunks_exact_mut(144) {
            (block[1], block[3]) = (0x24 | block[1] & 0x83, 0x20 | block[3] & 0x83);
        }
        bytes
    };
    (blocks(m), blocks(n))
}

/// Multiplies and asserts the host's bits, with bytes behind the result that are left alone.
fn assert_host_bits(on_card: &CardMatmul, dims: [usize; 3]) {
    let [m, k, n] = dims;
    let (a, b) = operands(dims);
    let mut expected = vec![0xA5; m * n * OUTPUT_ELEM_BYTES + 5];
    let mut out = expected.clone();
    HostMatmul.matmul_q4_k(&a, &b, &mut expected, m, k, n).expect("dimensions");
    on_card.matmul_q4_k(&a, &b, &mut out, m, k, n).expect("a product");
    assert!(out == expected, "{dims:?}: other bits");
    let values = expected.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word));
    assert!(values.take(m * n).all(|value| value.is_finite() && value != 0.0), "{dims:?}");
}

/// Multiplies 3 x 512 x 7 on a card that fails it, asserts that the output is as it was, and returns the card's name, the
/// step, what the card did and the words.
fn failure(on_card: &CardMatmul) -> (String, &'static str, DeviceFault, String) {
    let [m, k, n] = SHAPES[1];
    let (a, b) = operands(SHAPES[1]);
    let mut out = vec![0xA5; m * n * OUTPUT_ELEM_BYTES];
    let error = on_card.matmul_q4_k(&a, &b, &mut out, m, k, n).expect_err("a failure");
    assert!(out.iter().all(|byte| *byte == 0xA5), "{error}: the output has changed");
    match error.clone() {
        Error::Device { device, op, fault, .. } => (device, op, fault, error.to_string()),
        other => panic!("expected a device's failure, got {other}"),
    }
}

#[test]
fn products_on_a_simulated_card_have_the_hosts_bits_and_leave_no_buffer() {
    let world = world(2);
    let free = || world.control(0).info().expect("an answer").available;
    let before = free();
    let on_card = on_card(world.control(0));
    for dims in SHAPES {
        assert_host_bits(&on_card, dims);
        assert_eq!(free(), before, "{dims:?}");
    }
}

#[test]
fn products_on_a_card_behind_a_socket_have_the_hosts_bits_at_every_pace() {
    for pace in [Pace::Unshaped, Pace::Card, Pace::Wall] {
        let lone = Lone::start(pace);
        let patient = Deadline { detect: Duration::from_secs(10), ..Deadline::USUAL };
        let on_card = CardMatmul::new(lone.open(), patient).expect("a card");
        SHAPES.iter().for_each(|&dims| assert_host_bits(&on_card, dims));
    }
}

#[test]
fn products_on_cards_of_every_minor_version_have_the_hosts_bits_or_are_refused_by_name() {
    for minor in 0..=ABI_VERSION_MINOR + 1 {
        let world = world_of(2, Some(minor));
        // The whole product at once, and its rows as a backend does them.
        let product = Arc::new(Product::synthetic(37, 512, 7, 3).expect("dimensions"));
        let rows = CardProduct::new(Arc::clone(&product), world.control(0), DEADLINE);
        match CardMatmul::new(world.control(0), DEADLINE) {
            Ok(on_card) => {
                assert!(minor >= 2, "0.{minor}");
                assert_host_bits(&on_card, SHAPES[1]);
                let (mut out, mut expected) = (vec![0; 37 * 7 * 4], vec![0; 37 * 7 * 4]);
                rows.expect("a card").run(0..37, &mut out).expect("rows");
                product.rows(0..37, &mut expected).expect("rows");
                assert!(out == expected, "0.{minor}: other bits");
            }
            Err(error) => {
                let why = |what| format!("{what} needs ABI 0.2.0, the card speaks 0.{minor}.0");
                assert_eq!(error.to_string(), format!("a card: {}", why("work MATMUL")));
                assert!(matches!(error, JobError::Card { .. }) && minor < 2, "0.{minor}");
                let error = rows.expect_err("too old").to_string();
                assert!(error.ends_with(&why("request CARD_INFO")), "{error}");
            }
        }
    }
}

#[test]
fn dimensions_and_outputs_are_refused_as_on_the_host_and_nothing_is_asked_of_the_card() {
    let world = world(2);
    let on_card = on_card(world.control(0));
    // Whatever is asked of it from now on fails.
    world.disturb(Disturbance::Kill(0));
    let (a, b) = operands([2, 256, 3]);
    let long = [&a[..], &[0]].concat();
    let cases = [
        (&a[..], &b[..], 24, [2, 0, 3]),
        (&a, &b, 24, [2, 255, 3]),
        (&a, &b, 24, [2, usize::MAX, 3]),
        (&a[1..], &b, 24, [2, 256, 3]),
        (&long, &b, 24, [2, 256, 3]),
        (&a, &b[..144], 24, [2, 256, 3]),
        (&[], &[], 0, [usize::MAX, 256, 1]),
        (&a, &b, 23, [2, 256, 3]),
        (&a, &b, 0, [2, 256, 3]),
    ];
    for (a, b, room, [m, k, n]) in cases {
        let (mut out, mut theirs) = (vec![0xA5; room], vec![0xA5; room]);
        let refused = on_card.matmul_q4_k(a, b, &mut out, m, k, n);
        assert_eq!(refused, HostMatmul.matmul_q4_k(a, b, &mut theirs, m, k, n));
        match refused.expect_err("refused") {
            Error::BadDims { .. } => assert_ne!([m, k, n, room, a.len()], [2, 256, 3, 23, 288]),
            Error::OutputTooSmall { have, need } => assert_eq!((have, need), (room, 24)),
            other => panic!("{other}"),
        }
        assert!(out.iter().all(|byte| *byte == 0xA5));
    }
    let mut out = [0xA5; 8];
    for (m, n) in [(0, 3), (2, 0), (0, 0)] {
        assert_eq!(on_card.matmul_q4_k(&a, &b, &mut out, m, 256, n), Ok(()));
    }
    assert_eq!(out, [0xA5; 8]);
}

/// A way to a card that dies before its request of some number, or answers that with something else.
#[derive(Debug)]
struct Fragile {
    inner: Box<dyn Transport>,
    world: World,
    /// The number of the fatal request, from 0, and what to answer if the card is to live.
    fatal: (usize, Option<Errno>),
    seen: Arc<Mutex<Vec<&'static str>>>,
}

impl Transport for Fragile {
    fn call(&self, call: &mut Call<'_>) -> spanker_runtime::Result<()> {
        let mut seen = self.seen.lock().expect("no panic");
        seen.push(call.name);
        match self.fatal {
            (at, None) if at + 1 == seen.len() => self.world.disturb(Disturbance::Kill(0)),
            (at, Some(source)) if at + 1 == seen.len() => {
                return Err(CardError::Ioctl { op: call.name, source });
            }
            _ => {}
        }
        self.inner.call(call)
    }
}

/// A product on a card whose request of some number after its introduction fails; and the requests of the product.
fn fragile(at: usize, answer: Option<Errno>) -> (CardMatmul, Arc<Mutex<Vec<&'static str>>>) {
    let world = world(2);
    let seen = Arc::new(Mutex::new(Vec::new()));
    // GET_VERSION and CARD_INFO come first.
    let fatal = (at + 2, answer);
    let inner = world.transport(0);
    let way = Fragile { inner, world, fatal, seen: Arc::clone(&seen) };
    (on_card(SpankerControl::over(Box::new(way))), seen)
}

/// The requests of a product, and the step that each belongs to.
const REQUESTS: [(&str, &str); 11] = [
    ("ALLOCATE", "allocate"),
    ("ALLOCATE", "allocate"),
    ("ALLOCATE", "allocate"),
    ("WRITE", "write"),
    ("WRITE", "write"),
    ("SUBMIT", "submit"),
    ("WAIT", "wait"),
    ("READ", "read"),
    ("FREE", "free"),
    ("FREE", "free"),
    ("FREE", "free"),
];

#[test]
fn card_that_dies_before_any_request_of_a_product_is_named_with_the_step() {
    let (whole, seen) = fragile(REQUESTS.len(), None);
    assert_host_bits(&whole, SHAPES[1]);
    let names = REQUESTS.map(|(name, _)| name);
    assert_eq!(seen.lock().expect("no panic")[2..], names);
    for (at, (name, step)) in REQUESTS.into_iter().enumerate() {
        let (on_card, _) = fragile(at, None);
        let (device, op, fault, text) = failure(&on_card);
        assert_eq!((device.as_str(), op, fault), ("card 0", step, DeviceFault::Lost), "{at}");
        assert_eq!(text, format!("card 0: {step}: the card is gone ({name})"));
        // It stays dead.
        assert_eq!(failure(&on_card).2, DeviceFault::Lost);
    }
}

#[test]
fn card_that_refuses_any_request_of_a_product_is_named_and_does_the_next_one() {
    for (at, (name, step)) in REQUESTS.into_iter().enumerate() {
        let (on_card, _) = fragile(at, Some(Errno::EPERM));
        let (_, op, fault, text) = failure(&on_card);
        assert_eq!((op, fault), (step, DeviceFault::Refused), "{at}");
        let why = Errno::EPERM.desc();
        assert_eq!(text, format!("card 0: {step}: {name} refused ({why})"));
        assert_host_bits(&on_card, SHAPES[1]);
    }
}

#[test]
fn card_that_dies_while_it_computes_is_lost_and_one_that_stands_still_is_stuck() {
    let world = world(2);
    let on_card = on_card(world.control(0));
    world.disturb(Disturbance::Stick(0));
    let (_, op, fault, text) = failure(&on_card);
    assert_eq!((op, fault), ("wait", DeviceFault::Stuck), "{text}");
    assert!(text.starts_with("card 0: wait: no progress for 50 ms"), "{text}");
    world.disturb_in(Duration::from_millis(20), Disturbance::Kill(0));
    let (_, op, fault, text) = failure(&on_card);
    assert_eq!((op, fault), ("wait", DeviceFault::Lost), "{text}");
}

#[test]
fn silent_card_is_stuck_and_a_busy_one_is_busy_until_it_is_free() {
    let world = world(2);
    let busy = on_card(world.control(0));
    let other = world.control(0);
    occupy(&other);
    assert_eq!((failure(&busy).1, failure(&busy).2), ("submit", DeviceFault::Busy));
    drop(other);
    assert_host_bits(&busy, SHAPES[1]);
    let silent = on_card(world.control(1));
    world.disturb(Disturbance::Stop(1));
    let (device, _, fault, text) = failure(&silent);
    assert_eq!((device.as_str(), fault), ("card 1", DeviceFault::Stuck), "{text}");
}

#[test]
fn card_without_the_memory_says_how_much_is_needed_and_free_and_can_go_on_with_less() {
    let world = world(2);
    let card = world.control(0);
    let free = card.info().expect("an answer").available;
    // Pages that are left: one for each operand of the small product and none for a large one.
    let hog = world.control(0);
    hog.allocate(free - 3 * 4096).expect("nearly all of it");
    let on_card = on_card(card);
    let [m, k, n] = SHAPES[2];
    let (a, b) = operands(SHAPES[2]);
    let mut out = vec![0xA5; m * n * OUTPUT_ELEM_BYTES];
    let error = on_card.matmul_q4_k(&a, &b, &mut out, m, k, n).expect_err("no memory");
    assert_eq!(
        error.to_string(),
        "card 0: allocate: no room for 73728 bytes, 12288 are free",
        "{error:?}"
    );
    assert!(matches!(error, Error::Device { fault: DeviceFault::Memory, .. }), "{error:?}");
    assert!(out.iter().all(|byte| *byte == 0xA5));
    assert_host_bits(&on_card, SHAPES[1]);
    // The operands fit and the result does not: what was allocated is given back.
    let left = hog.info().expect("an answer").available;
    let (a, b) = operands([40, 256, 28]);
    let mut out = vec![0xA5; 40 * 28 * OUTPUT_ELEM_BYTES];
    let error = on_card.matmul_q4_k(&a, &b, &mut out, 40, 256, 28).expect_err("no memory");
    assert!(error.to_string().contains("no room for 4480 bytes"), "{error}");
    assert_eq!(hog.info().expect("an answer").available, left);
}

#[test]
fn calls_of_many_threads_take_turns_and_get_their_own_products() {
    let world = world(2);
    let on_card = on_card(world.control(0));
    std::thread::scope(|scope| {
        for rows in 1..6 {
            let on_card = &on_card;
            scope.spawn(move || assert_host_bits(on_card, [rows, 512, 9]));
        }
    });
}

#[test]
fn card_that_leaves_in_the_middle_of_a_product_is_lost_and_the_output_is_as_it_was() {
    let mut lone = Lone::start(Pace::Wall);
    let patient = Deadline { detect: Duration::from_secs(30), ..Deadline::USUAL };
    let on_card = CardMatmul::new(lone.open(), patient).expect("a card");
    // Seconds at the pace of the profile.
    let [m, k, n] = [64, 2048, 8192];
    let (a, b) = (vec![0x31; m * k / QK_K * 144], vec![0x24; n * k / QK_K * 144]);
    let mut out = vec![0xA5; m * n * OUTPUT_ELEM_BYTES];
    let onlooker = lone.open();
    let error = std::thread::scope(|scope| {
        let product = scope.spawn(|| on_card.matmul_q4_k(&a, &b, &mut out, m, k, n));
        let state = || onlooker.state(Duration::from_secs(5)).expect("an answer").activity;
        while state() == spanker_runtime::Activity::Idle {
            assert!(!product.is_finished(), "the product was over before the card left");
            std::thread::yield_now();
        }
        lone.leave();
        product.join().expect("no panic").expect_err("no card")
    });
    assert!(matches!(error, Error::Device { fault: DeviceFault::Lost, .. }), "{error:?}");
    assert!(out.iter().all(|byte| *byte == 0xA5), "{error}: the output has changed");
}
