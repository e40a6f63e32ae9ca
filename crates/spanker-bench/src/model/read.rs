// SPDX-License-Identifier: Apache-2.0
//! How fast threads can read the weights of a token, and do no more with them than add them up.

use std::hint::black_box;
use std::ops::Range;
use std::time::Instant;

use spanker_llm::Network;
use spanker_reduce::Team;

/// Bytes of a unit: small beside a core's share of the caches.
const UNIT: usize = 256 << 10;

/// Where the weights lie that every token reads.
pub(super) struct Weights {
    units: Vec<Range<usize>>,
}

impl Weights {
    /// All matrices, but not a table of embeddings of which a token reads one row.
    pub(super) fn of<B: AsRef<[u8]>>(network: &Network<B>) -> Weights {
        let header = network.header();
        let apart = header.tensors().contains_key("output.weight");
        let mut units = Vec::new();
        for (name, tensor) in header.tensors() {
            if tensor.dims.len() < 2 || (apart && name == "token_embd.weight") {
                continue;
            }
            let start = (header.data_offset() + tensor.offset) as usize;
            let end = start + tensor.bytes as usize;
            units.extend((start..end).step_by(UNIT).map(|from| from..end.min(from + UNIT)));
        }
        units.sort_by_key(|unit| unit.start);
        Weights { units }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.units.iter().map(|unit| unit.len() as u64).sum()
    }

    /// Seconds to read them all once.
    pub(super) fn read(&self, file: &[u8], team: &Team) -> f64 {
        let begun = Instant::now();
        team.run(team.threads(), self.units.len(), &|at| {
            black_box(sum(&file[self.units[at].clone()]));
        });
        begun.elapsed().as_secs_f64()
    }
}

/// Places of a unit that are read side by side: a core fetches ahead for several runs of memory at once, and
/// products of several rows of weights make use of that.
const RUNS: usize = 8;

/// The sum of all words but those of a part of a round at the end. Several sums side by side, so that no
/// addition waits for another.
fn sum(bytes: &[u8]) -> u64 {
    let rounds = bytes.as_chunks::<64>().0;
    let each = rounds.len() / RUNS;
    let mut sums = [[0u64; 8]; RUNS];
    let mut add = |run: usize, round: &[u8; 64]| {
        for (sum, &word) in sums[run].iter_mut().zip(round.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(word));
        }
    };
    for at in 0..each {
        for run in 0..RUNS {
            add(run, &rounds[run * each + at]);
        }
    }
    rounds[RUNS * each..].iter().for_each(|round| add(0, round));
    sums.into_iter().flatten().fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::sum;

    #[test]
    fn sum_of_words_counts_each_once_and_leaves_a_part_of_a_round_out() {
        let bytes: Vec<u8> = (0..200u64).flat_map(u64::to_le_bytes).collect();
        assert_eq!(sum(&bytes), 199 * 100);
        assert_eq!(sum(&bytes[..100]), 28);
    }
}
