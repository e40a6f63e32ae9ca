// SPDX-License-Identifier: Apache-2.0
//! How fast threads, cards and all of them together do one product: medians of rounds that take turns. Cards are given by
//! path; without any, the product runs on threads only.
//!
//!     cargo run --release -p spanker-engine --example bench_shared -- 2 DIRECTORY/spanker0 DIRECTORY/spanker1

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use spanker_engine::jobs::{CardProduct, Product, on_threads};
use spanker_fabric::device::Deadline;
use spanker_runtime::SpankerControl;
use spanker_steal::{Backend, WorkStealingScheduler};

const ROUNDS: usize = 9;
const DIMS: [usize; 3] = [4096, 2048, 2048];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let threads: usize = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let [m, k, n] = DIMS;
    let product = Arc::new(Product::synthetic(m, k, n, 1)?);
    let mut all = vec![("threads".to_owned(), on_threads(Arc::clone(&product), threads))];
    for path in arguments {
        let card = SpankerControl::open_path(&path)?;
        let card = CardProduct::new(Arc::clone(&product), card, Deadline::USUAL)?;
        all.push((path, Arc::new(card) as Arc<dyn Backend>));
    }
    let mut runs: Vec<(String, WorkStealingScheduler, Vec<Duration>)> = Vec::new();
    for (name, backend) in &all {
        let alone = WorkStealingScheduler::new(vec![Arc::clone(backend)]);
        runs.push((name.clone(), alone, Vec::new()));
    }
    let together = all.iter().map(|(_, backend)| Arc::clone(backend)).collect();
    runs.push(("together".to_owned(), WorkStealingScheduler::new(together), Vec::new()));
    let mut expected = vec![0; m * n * 4];
    product.rows(0..m, &mut expected)?;
    let mut out = vec![0; expected.len()];
    let mut shares: Vec<(usize, usize)> = Vec::new();
    for _ in 0..ROUNDS {
        for (name, scheduler, times) in &mut runs {
            out.fill(0);
            let report = scheduler.run(&product.job(), &mut out)?;
            if out != expected {
                return Err(format!("{name}: wrong bits").into());
            }
            times.push(report.elapsed);
            shares = report.backends.iter().map(|one| (one.items, one.chunks)).collect();
        }
    }
    println!("{m} x {k} x {n}, {threads} threads, medians of {ROUNDS}");
    for (name, _, times) in &mut runs {
        times.sort();
        let middle = times[ROUNDS / 2];
        println!("{name}: {middle:.1?}, {:.0} rows/s", m as f64 / middle.as_secs_f64());
    }
    println!("rows and chunks of each in the last round together: {shares:?}");
    Ok(())
}
