// SPDX-License-Identifier: Apache-2.0
//! An all-reduce: on four mock cards, whose buffers are in host memory, and on the cards of this machine, if it has
//! any. Emulated ones will do: `spanker twin up --cards 4` starts them, and `SPANKER_DEV_DIR` says where they are.
//!
//!     cargo run --example collective

use std::time::Instant;

use spanker_scheduler::{
    AllReduce, Collective, DType, Error, MockSail, ReduceOp, SpankerControl, Topology,
};

const ELEMENTS: usize = 1 << 16;

/// What each card contributes: its number plus one, in every element.
fn inputs(cards: usize) -> Vec<Vec<f32>> {
    (0..cards).map(|card| vec![(card + 1) as f32; ELEMENTS]).collect()
}

/// Every card must have the sum of all contributions.
fn check(buffers: &[Vec<f32>]) {
    let sum = (1..=buffers.len()).sum::<usize>() as f32;
    assert!(buffers.iter().flatten().all(|&element| element == sum), "a wrong element");
}

fn on_cards(cards: &Topology<SpankerControl>) -> Result<(), Error> {
    let mut buffers = inputs(cards.n_sails());
    // The planner's prices for these cards and links decide which schedule they run.
    let algorithm = cards.algorithm(Collective::AllReduce, ELEMENTS, DType::F32)?;
    if let Err(error) = cards.all_reduce_f32(&mut buffers, ReduceOp::Sum) {
        // The buffers are as they were, the error names the card or link, and the others can go on.
        eprintln!("hint: go on with cards {:?}", cards.survivors(&error));
        return Err(error);
    }
    check(&buffers);
    println!("{} cards, by {algorithm}: every element is {}", buffers.len(), buffers[0][0]);
    Ok(())
}

fn main() -> Result<(), Error> {
    let mock = Topology::<MockSail>::with_mock(4);
    let mut buffers = inputs(mock.n_sails());
    let begun = Instant::now();
    mock.all_reduce_f32(&mut buffers, ReduceOp::Sum)?;
    println!("4 mock cards, in {:?}: every element is {}", begun.elapsed(), buffers[0][0]);
    check(&buffers);

    match Topology::enumerate() {
        Ok(cards) => on_cards(&cards),
        // The one error that is fine: this machine has no cards, and nobody has emulated any.
        Err(error @ Error::NoSails) => {
            println!("{error}\nhint: `spanker twin up --cards 4` starts emulated ones");
            Ok(())
        }
        Err(error) => Err(error),
    }
}
