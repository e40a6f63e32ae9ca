// SPDX-License-Identifier: Apache-2.0
//! Weights in the order in which a graphics processor likes to read them: what is read together lies together, in
//! planes that begin at multiples of 16 bytes. No byte is changed, added or lost.

use spanker_model::Quant;

/// The parts of a block, in the order of their planes: where each begins in the block, and its bytes. Nothing where
/// blocks stay as they are.
fn parts(quant: Quant) -> &'static [(usize, usize)] {
    match quant {
        Quant::Q4_0 => &[(2, 16), (0, 2)],
        Quant::Q4_1 => &[(4, 16), (0, 4)],
        Quant::Q5_0 => &[(6, 16), (2, 4), (0, 2)],
        Quant::Q5_1 => &[(8, 16), (4, 4), (0, 4)],
        Quant::Q8_0 => &[(2, 32), (0, 2)],
        Quant::Q6K => &[(0, 128), (128, 64), (192, 16), (208, 2)],
        _ => &[],
    }
}

/// Whole blocks in planes, appended to `out`.
pub(super) fn in_planes(quant: Quant, blocks: &[u8], out: &mut Vec<u8>) {
    let size = quant.block_bytes() as usize;
    let parts = parts(quant);
    if parts.is_empty() {
        return out.extend_from_slice(blocks);
    }
    out.reserve(blocks.len());
    for &(start, length) in parts {
        for block in blocks.chunks_exact(size) {
            out.extend_from_slice(&block[start..start + length]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_have_every_byte_of_every_block_once() {
        for quant in [Quant::Q4_0, Quant::Q4_1, Quant::Q5_0, Quant::Q5_1, Quant::Q8_0, Quant::Q6K] {
            let size = quant.block_bytes() as usize;
            let mut covered: Vec<usize> =
                parts(quant).iter().flat_map(|&(start, length)| start..start + length).collect();
            covered.sort_unstable();
            assert_eq!(covered, (0..size).collect::<Vec<_>>(), "{quant}");
        }
    }

    #[test]
    fn planes_can_be_put_back_together() {
        for quant in [Quant::Q4_0, Quant::Q5_1, Quant::Q6K, Quant::Q4K, Quant::F16] {
            let size = quant.block_bytes() as usize;
            let blocks: Vec<u8> = (0..size * 5).map(|i| (i * 31 % 251) as u8).collect();
            let mut planes = Vec::new();
            in_planes(quant, &blocks, &mut planes);
            let mut back = vec![0; blocks.len()];
            let (mut at, whole) = (0, [(0, size)]);
            let parts = if parts(quant).is_empty() { &whole[..] } else { parts(quant) };
            for &(start, length) in parts {
                for block in back.chunks_exact_mut(size) {
                    block[start..start + length].copy_from_slice(&planes[at..at + length]);
                    at += length;
                }
            }
            assert_eq!(back, blocks, "{quant}");
        }
    }
}
