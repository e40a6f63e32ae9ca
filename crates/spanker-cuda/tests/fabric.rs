// SPDX-License-Identifier: Apache-2.0
//! The fabric on the graphics processors that are there: conformance, with ranks that share one and ranks on all. Without
//! any it is skipped aloud, unless `REQUIRE_CARDS=1` asks for a failure.

use std::env;

use spanker_cuda::{CudaFabric, gpu_count};
use spanker_fabric::conformance;

#[test]
fn the_fabric_on_graphics_processors_conforms() {
    let there = match gpu_count() {
        Ok(there) => there,
        Err(error) => {
            let required = env::var("REQUIRE_CARDS").is_ok_and(|value| value == "1");
            assert!(!required, "REQUIRE_CARDS=1 but: {error}");
            eprintln!("skipped: {error}");
            return;
        }
    };
    let all: Vec<usize> = (0..there).collect();
    for gpus in [&all[..1], &all].into_iter().take(there) {
        conformance::check(|ranks| CudaFabric::group(gpus, ranks).expect("a group"));
    }
}
