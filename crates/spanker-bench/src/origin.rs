// SPDX-License-Identifier: Apache-2.0
//! The loops that the first version ran, as the peer that this one is compared with. The all-reduce is the one after its
//! transposition, card-outer; the element-outer loop before that is timed by the example `transposition` of
//! `spanker-reduce`.

use crate::element::{BenchElement, Buffer};

/// All-reduce: fold card after card into a fresh buffer, finish it, copy it to each card.
#[inline(always)]
pub(crate) fn all_reduce<T: BenchElement>(
    cards: &mut [Buffer<T>],
    fold: impl Fn(T, T) -> T,
    finish: impl Fn(T, usize) -> T,
) {
    let Some((first, rest)) = cards.split_first() else { return };
    let mut reduced = first.as_ref().to_vec();
    for card in rest {
        for (total, &x) in reduced.iter_mut().zip(card.as_ref()) {
            *total = fold(*total, x);
        }
    }
    let count = cards.len();
    for total in &mut reduced {
        *total = finish(*total, count);
    }
    for card in cards {
        card.as_mut().copy_from_slice(&reduced);
    }
}

/// All-gather: append card after card to a fresh buffer, copy it to each card.
pub(crate) fn all_gather<T: BenchElement>(inputs: &[Buffer<T>], outputs: &mut [Buffer<T>]) {
    let mut gathered = Vec::with_capacity(inputs.iter().map(|input| input.as_ref().len()).sum());
    for input in inputs {
        gathered.extend_from_slice(input.as_ref());
    }
    for output in outputs {
        output.as_mut().copy_from_slice(&gathered);
    }
}
