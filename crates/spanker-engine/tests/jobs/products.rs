// SPDX-License-Identifier: Apache-2.0
//! Products over unequal backends, threads and emulated cards, healthy and not: always the bits of one thread.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ggml_spanker::{HostMatmul, MatmulInt4};
use proptest::prelude::{ProptestConfig, prop_assert_eq, proptest};
use spanker_engine::jobs::{CardProduct, JobError, Product, on_threads};
use spanker_runtime::SpankerControl;
use spanker_steal::{Backend, Incident, IncidentKind, Options, Report, WorkStealingScheduler};
use spanker_twin::{Disturbance, World};

use super::watched::watched;
use super::{DEADLINE, faults, fill, occupy, world};

fn product(m: usize, k: usize, n: usize) -> Arc<Product> {
    Arc::new(Product::synthetic(m, k, n, 11).expect("dimensions"))
}

/// All rows, by one call on one thread.
fn whole(product: &Product) -> Vec<u8> {
    let [m, _, n] = product.dims();
    let mut out = vec![0; m * n * 4];
    product.rows(0..m, &mut out).expect("rows");
    out
}

fn on_card(product: &Arc<Product>, card: SpankerControl) -> CardProduct {
    CardProduct::new(Arc::clone(product), card, DEADLINE).expect("a card")
}

/// Runs a job, and asserts that the result has the bits of one thread.
fn run(product: &Product, backends: Vec<Arc<dyn Backend>>, options: Options) -> Report {
    let expected = whole(product);
    let mut out = vec![0; expected.len()];
    let job = product.job().options(options);
    let report = WorkStealingScheduler::new(backends).run(&job, &mut out).expect("a run");
    assert_eq!((report.done, report.duplicated), (product.dims()[0], 0));
    assert!(out == expected, "other bits: {report:?}");
    report
}

/// Chunks so short that every backend gets many.
fn short() -> Options {
    Options { cap: Duration::from_micros(500), ..Options::STANDARD }
}

/// Two cards. Something happens to the second one before its task number `at`, and the first one does nothing until
/// then.
fn one_disturbed(
    product: &Arc<Product>,
    world: &World,
    at: usize,
    what: Disturbance,
) -> Vec<Arc<dyn Backend>> {
    let happened = Arc::new(AtomicBool::new(false));
    let (tell, world_of_it) = (Arc::clone(&happened), world.clone());
    let well = watched(Arc::new(on_card(product, world.control(0))), move |_| {
        while !happened.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    });
    let ill = watched(Arc::new(on_card(product, world.control(1))), move |task| {
        if task == at {
            world_of_it.disturb(what);
            tell.store(true, Ordering::Release);
        }
    });
    vec![well, ill]
}

#[test]
fn synthetic_product_has_the_bits_of_the_contract() {
    let product = Product::synthetic(5, 512, 7, 3).expect("dimensions");
    assert_eq!(product, Product::synthetic(5, 512, 7, 3).expect("dimensions"));
    assert_ne!(product, Product::synthetic(5, 512, 7, 4).expect("dimensions"));
    let out = whole(&product);
    let values = out.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word));
    let square: f32 = values.map(|value| value * value).sum::<f32>() / 35.0;
    // Rows of a variance of 1/k give products with a variance of 1/k.
    assert!((0.2..5.0).contains(&(square * 512.0)), "{square}");
}

#[test]
fn given_operands_are_multiplied_as_the_host_does_it() {
    let block = |byte: u8| vec![byte; 144];
    let (a, b) = ([block(0x11), block(0x23)].concat(), block(0x31));
    let mut expected = [0; 8];
    HostMatmul.matmul_q4_k(&a, &b, &mut expected, 2, 256, 1).expect("dimensions");
    let product = Product::new(a, b, 2, 256, 1).expect("dimensions");
    assert_eq!(whole(&product), expected);
}

#[test]
fn dimensions_that_make_no_product_are_refused_and_named() {
    let refused = |m, k, n| Product::synthetic(m, k, n, 0).expect_err("no product").to_string();
    assert_eq!(refused(0, 256, 1), "nothing to do: a product of 0 and 1 rows");
    assert_eq!(refused(1, 256, 0), "nothing to do: a product of 1 and 0 rows");
    assert_eq!(refused(3, 100, 2), "bad dimensions: m = 3, k = 100, n = 2 with blocks of 256");
    assert_eq!(refused(3, 0, 2), "bad dimensions: m = 3, k = 0, n = 2 with blocks of 256");
    assert!(refused(usize::MAX, 256, 2).starts_with("bad dimensions: m = 18446744073709551615"));
    let huge = Product::synthetic(1 << 50, 256, 1, 0).expect_err("no memory");
    assert!(matches!(huge, JobError::Memory { .. }), "{huge}");
    for (a, b) in [(143, 144), (144, 145), (0, 144), (288, 144)] {
        let error = Product::new(vec![0; a], vec![0; b], 1, 256, 1).expect_err("other lengths");
        assert!(matches!(error, JobError::Product(_)), "{error}");
    }
}

#[test]
fn rows_that_are_not_there_or_do_not_fit_are_refused_everywhere() {
    let product = product(20, 256, 3);
    let world = world(2);
    let card = on_card(&product, world.control(0));
    let threads = on_threads(Arc::clone(&product), 1);
    for (items, bytes) in [(19..21, 24), (0..2, 23), (0..2, 36), (0..usize::MAX, 12)] {
        let mut out = vec![0; bytes];
        for backend in [&card as &dyn Backend, threads.as_ref()] {
            let failure = backend.run(items.clone(), &mut out).expect_err("no such rows");
            assert!(!failure.is_lasting(), "{items:?}: {failure}");
        }
    }
    let mut out = vec![0; 12];
    card.run(19..20, &mut out).expect("a card that still works");
    assert_eq!(out, whole(&product)[19 * 12..]);
}

#[test]
fn three_unequal_backends_give_the_bits_of_one_thread() {
    let product = product(700, 512, 96);
    let slow = Arc::clone(&product);
    let slow = spanker_steal::Cpu::new(1, move |items: Range<usize>, out: &mut [u8]| {
        std::thread::sleep(Duration::from_micros(20 * items.len() as u64));
        slow.rows(items, out)
    });
    let backends = vec![
        on_threads(Arc::clone(&product), 2),
        on_threads(Arc::clone(&product), 1),
        Arc::new(slow),
    ];
    let report = run(&product, backends, short());
    assert!(faults(&report).is_empty(), "{report:?}");
}

#[test]
fn card_alone_gives_the_bits_of_one_thread() {
    for (m, k, n) in [(1, 256, 1), (37, 256, 5), (150, 1024, 130), (3, 2560, 40)] {
        let product = product(m, k, n);
        let world = world(2);
        let backend: Arc<dyn Backend> = Arc::new(on_card(&product, world.control(1)));
        assert_eq!((backend.id(), backend.capabilities().in_flight), ("card", 2));
        let report = run(&product, vec![backend], short());
        assert!(faults(&report).is_empty(), "{report:?}, {m} x {k} x {n}");
    }
}

#[test]
fn card_called_for_more_rows_than_fit_it_does_them_in_pieces() {
    // A row of results of 1 MiB: sixteen fit.
    let product = product(40, 256, 1 << 18);
    let world = world(2);
    let card = on_card(&product, world.control(0));
    assert_eq!(card.capabilities().most_items, Some(16));
    let mut out = vec![0; 40 << 20];
    card.run(0..40, &mut out).expect("rows");
    assert!(out == whole(&product));
}

#[test]
fn threads_and_two_cards_share_a_product_and_give_the_bits_of_one_thread() {
    let product = product(900, 512, 128);
    let world = world(3);
    let backends = vec![
        on_threads(Arc::clone(&product), 1),
        Arc::new(on_card(&product, world.control(0))),
        Arc::new(on_card(&product, world.control(2))),
    ];
    // Everything is done twice, by different backends, and compared.
    let audited = Options { sample: 1.0, checksums: true, ..short() };
    let report = run(&product, backends, audited);
    assert!(faults(&report).is_empty(), "{report:?}");
    assert_eq!(report.backends.iter().map(|one| one.items).sum::<usize>(), 900);
}

#[test]
fn card_that_dies_in_the_middle_is_named_and_others_do_its_rows() {
    let product = product(900, 512, 128);
    let world = world(2);
    let backends = one_disturbed(&product, &world, 2, Disturbance::Kill(1));
    let report = run(&product, backends, short());
    let benched = report.backends[1].benched.as_deref().expect("a dead card");
    assert!(benched.contains("card 1: the card is gone"), "{benched}");
    assert_eq!(report.backends[0].benched, None);
    assert!(report.incidents.iter().any(|one| one.kind == IncidentKind::Failed));
}

#[test]
fn card_that_answers_but_does_no_work_is_given_up_after_its_deadline() {
    let product = product(300, 256, 64);
    let world = world(2);
    let backends = one_disturbed(&product, &world, 1, Disturbance::Stick(1));
    let report = run(&product, backends, short());
    let failed = |one: &&Incident| one.backend == "card1" && one.kind == IncidentKind::Failed;
    let first = report.incidents.iter().find(failed).expect("a stuck card");
    assert_eq!(first.what, "card 1: no progress for 50 ms");
}

#[test]
fn silent_card_is_lost_and_others_do_its_rows() {
    let product = product(300, 256, 64);
    let world = world(2);
    let backends = one_disturbed(&product, &world, 1, Disturbance::Stop(1));
    let report = run(&product, backends, short());
    let benched = report.backends[1].benched.as_deref().expect("a silent card");
    assert!(benched.contains("card 1: no answer to "), "{benched}");
}

#[test]
fn card_at_work_for_another_program_fails_for_now_and_works_later() {
    let product = product(20, 256, 3);
    let world = world(2);
    let card = on_card(&product, world.control(0));
    let other = world.control(0);
    occupy(&other);
    let mut out = vec![0; 20 * 12];
    let failure = card.run(0..20, &mut out).expect_err("a card that is busy");
    assert!(!failure.is_lasting());
    assert!(failure.to_string().starts_with("card 0: SUBMIT refused"), "{failure}");
    drop(other);
    card.run(0..20, &mut out).expect("a card that is free");
    assert_eq!(out, whole(&product));
}

#[test]
fn calls_of_many_threads_at_a_time_all_get_their_own_rows() {
    let product = product(160, 256, 24);
    let world = world(2);
    let card = on_card(&product, world.control(0));
    let expected = whole(&product);
    std::thread::scope(|scope| {
        for (place, expected) in expected.chunks_exact(20 * 96).enumerate() {
            let card = &card;
            scope.spawn(move || {
                for _ in 0..5 {
                    let mut out = vec![0; 20 * 96];
                    card.run(place * 20..(place + 1) * 20, &mut out).expect("rows");
                    assert_eq!(out, expected, "part {place}");
                }
            });
        }
    });
}

#[test]
fn card_that_computes_garbage_is_found_out_and_its_rows_are_done_again() {
    let product = product(600, 256, 64);
    let world = world(2);
    world.disturb(Disturbance::Garble(1));
    let card = Arc::new(on_card(&product, world.control(1)));
    let backends = vec![on_threads(Arc::clone(&product), 1), card];
    let report = run(&product, backends, Options { sample: 1.0, ..short() });
    assert!(report.backends[1].benched.is_some(), "{report:?}");
}

#[test]
fn card_without_the_memory_or_that_is_gone_is_refused_at_once() {
    let world = world(2);
    let card = world.control(0);
    fill(&card);
    let error = CardProduct::new(product(20, 256, 64), card, DEADLINE).expect_err("no memory");
    assert!(error.to_string().starts_with("card 0: no room for 9216 bytes"), "{error}");
    let card = world.control(1);
    world.disturb(Disturbance::Kill(1));
    let error = CardProduct::new(product(20, 256, 64), card, DEADLINE).expect_err("no card");
    assert_eq!(error.to_string(), "a card: it says nothing: the card is gone (GET_VERSION)");
}

#[test]
fn card_is_free_again_when_its_backend_is_dropped() {
    let world = world(2);
    let other = world.control(0);
    let free = || other.info().expect("an answer").available;
    let before = free();
    let product = product(40, 256, 64);
    let backend = on_card(&product, world.control(0));
    assert!(free() < before);
    drop(backend);
    assert_eq!(free(), before);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_shape_on_threads_and_a_card_has_the_bits_of_one_thread(
        m in 1usize..120, blocks in 1usize..4, n in 1usize..70, seed: u64,
    ) {
        let product = Arc::new(Product::synthetic(m, blocks * 256, n, seed).expect("dimensions"));
        let world = world(2);
        let backends: Vec<Arc<dyn Backend>> = vec![
            on_threads(Arc::clone(&product), 1),
            Arc::new(on_card(&product, world.control(0))),
        ];
        let mut out = vec![0; m * n * 4];
        let report = WorkStealingScheduler::new(backends).run(&product.job(), &mut out).expect("a run");
        prop_assert_eq!(report.done, m);
        prop_assert_eq!(out, whole(&product));
    }
}
