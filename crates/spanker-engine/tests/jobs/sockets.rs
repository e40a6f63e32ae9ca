// SPDX-License-Identifier: Apache-2.0
//! Jobs on cards that are played behind sockets, with a clock of their own: the bits of one thread, also when a card goes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use spanker_engine::jobs::{CardProduct, Product, on_threads};
use spanker_fabric::device::Deadline;
use spanker_steal::{Backend, Cpu, Options, WorkStealingScheduler};
use spanker_twin::Pace;

use super::lone::Lone;
use super::watched::watched;

/// Patient: the machine may be busy.
const DEADLINE: Deadline =
    Deadline { detect: Duration::from_secs(10), total: Duration::from_secs(60), slow_after: None };

fn product() -> (Arc<Product>, Vec<u8>) {
    let product = Arc::new(Product::synthetic(500, 512, 64, 5).expect("dimensions"));
    let mut out = vec![0; 500 * 64 * 4];
    product.rows(0..500, &mut out).expect("rows");
    (product, out)
}

fn on_card(product: &Arc<Product>, lone: &Lone) -> Arc<dyn Backend> {
    Arc::new(CardProduct::new(Arc::clone(product), lone.open(), DEADLINE).expect("a card"))
}

#[test]
fn cards_of_every_pace_share_a_product_with_a_thread() {
    let (product, expected) = product();
    for pace in [Pace::Unshaped, Pace::Card, Pace::Wall] {
        let cards = [Lone::start(pace), Lone::start(pace)];
        let mut backends = vec![on_threads(Arc::clone(&product), 1)];
        backends.extend(cards.iter().map(|card| on_card(&product, card)));
        let options = Options { cap: Duration::from_millis(1), ..Options::STANDARD };
        let mut out = vec![0; expected.len()];
        let scheduler = WorkStealingScheduler::new(backends);
        let report = scheduler.run(&product.job().options(options), &mut out).expect("a run");
        assert_eq!(report.done, 500);
        assert!(out == expected, "{pace:?}: {report:?}");
    }
}

#[test]
fn card_that_goes_away_with_its_tasks_costs_no_row() {
    let (product, expected) = product();
    let lone = Lone::start(Pace::Unshaped);
    let inner = on_card(&product, &lone);
    let gone = Arc::new(AtomicBool::new(false));
    let (wait, rows) = (Arc::clone(&gone), Arc::clone(&product));
    let threads = Cpu::new(1, move |items, out: &mut [u8]| {
        while !wait.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        rows.rows(items, out)
    });
    // It goes before its second task, whatever has become of the first, and says so.
    let lone = Mutex::new(lone);
    let leaving = watched(inner, move |task| {
        if task == 1 {
            lone.lock().expect("no panic").leave();
            gone.store(true, Ordering::Release);
        }
    });
    let scheduler = WorkStealingScheduler::new(vec![leaving, Arc::new(threads)]);
    let mut out = vec![0; expected.len()];
    let report = scheduler.run(&product.job(), &mut out).expect("a run");
    assert!(out == expected, "{report:?}");
    assert_eq!(report.duplicated, 0);
    let benched = report.backends[0].benched.as_deref().expect("a card that is gone");
    assert!(benched.contains("card 0: the card is gone"), "{benched}");
}
