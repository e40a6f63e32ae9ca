// SPDX-License-Identifier: Apache-2.0
//! Blocks by plain rounding: those of Python's `gguf` where it has them, near enough to what was given everywhere, and values
//! that no block holds.

use super::{ENCODE_TYPES, encode};
use crate::decode::decode;
use crate::{Error, Quant};

/// Numbers with few digits, from a generator that everybody can write down.
fn numbers(mut state: u32, count: usize) -> Vec<f32> {
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 16) as f32 - 32_768.0) / 4096.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn encoded(quant: Quant, values: &[f32]) -> Vec<u8> {
    let blocks = values.len() / quant.block() as usize;
    // What was there before does not matter.
    let mut out = vec![0xa5; blocks * quant.block_bytes() as usize];
    encode(quant, values, &mut out).expect("whole blocks");
    out
}

#[test]
fn blocks_are_those_of_gguf() {
    // Random numbers, zeros, small ones, and equal ones.
    let mut values = numbers(1, 32);
    values.extend([0.0; 32]);
    values.extend(numbers(2, 32).iter().map(|value| value / 1024.0));
    values.extend([0.5; 32]);
    // FNV-1a of the bytes that `gguf.quants.quantize` gives (gguf 0.19.0).
    for (quant, expected) in [
        (Quant::Bf16, 0x556d_e68b_4009_5d71),
        (Quant::Q4_0, 0x7644_4588_e5e4_552c),
        (Quant::Q4_1, 0xa87d_cf4d_853c_0a84),
        (Quant::Q5_0, 0x2f8a_5412_a59a_ad6e),
        (Quant::Q5_1, 0x218b_f59f_24a3_7354),
        (Quant::Q8_0, 0xfbb3_2151_8331_e234),
        (Quant::Mxfp4, 0x2ff6_21f3_33a8_ee98),
    ] {
        let hash = encoded(quant, &values).iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        assert_eq!(hash, expected, "{quant}");
    }
}

#[test]
fn every_weight_is_near_what_it_was() {
    for quant in ENCODE_TYPES {
        for (seed, scale, shift) in [(3, 1.0, 0.0), (4, 1e-3, 0.0), (5, 0.1, 5.0), (6, 0.1, -5.0)] {
            let values: Vec<f32> =
                numbers(seed, 1024).iter().map(|value| value * scale + shift).collect();
            let mut back = vec![0.0; values.len()];
            decode(quant, &encoded(quant, &values), &mut back).expect("blocks");
            // By the largest of a run of 32: half a step of the type, and what scales are rounded by.
            let part = match quant {
                Quant::F32 => 0.0,
                Quant::F16 => 0.0006,
                Quant::Bf16 => 0.004,
                Quant::Q8_0 => 0.0045,
                // Its scale is so small that an f16 has few digits for it.
                Quant::Q6K => 0.06,
                Quant::Q5_0 | Quant::Q5_1 | Quant::Q5K => 0.07,
                Quant::Mxfp4 => 0.26,
                // Three steps from the least to the largest.
                Quant::Q2K => 0.4,
                Quant::Q3K => 0.3,
                Quant::Iq4Xs => 0.15,
                // Nothing but zero and the largest of all.
                Quant::Tq1_0 | Quant::Tq2_0 => 1.0,
                _ => 0.135,
            };
            for (run, back) in values.chunks(32).zip(back.chunks(32)) {
                let most = run.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
                for (value, back) in run.iter().zip(back) {
                    assert!((value - back).abs() <= part * most, "{quant}: {value} became {back}");
                }
            }
        }
        let zeros = vec![0.0; 256];
        let mut back = vec![1.0; 256];
        decode(quant, &encoded(quant, &zeros), &mut back).expect("blocks");
        assert_eq!(back, zeros, "{quant}");
    }
}

#[test]
fn values_that_no_block_holds_and_lengths_that_are_wrong_are_refused() {
    for quant in ENCODE_TYPES {
        let (weights, bytes) = (quant.block() as usize, quant.block_bytes() as usize);
        let mut out = vec![0; 2 * bytes];
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            let mut values = vec![1.0; 2 * weights];
            values[2 * weights - 1] = value;
            let got = encode(quant, &values, &mut out);
            if value.is_finite() && matches!(quant, Quant::F32 | Quant::Mxfp4) {
                got.expect("room for any number");
            } else {
                let at = 2 * weights - 1;
                let refused = Error::Value { value: value.to_string(), at, quant };
                assert_eq!(got, Err(refused));
            }
        }
        if weights > 1 {
            let short = encode(quant, &vec![0.0; weights + 1], &mut out);
            assert!(matches!(short, Err(Error::PartialBlock { .. })), "{quant}");
        }
        let small = encode(quant, &vec![0.0; 3 * weights], &mut out);
        assert!(matches!(small, Err(Error::OutputTooSmall { .. })), "{quant}");
    }
    assert_eq!(encode(Quant::Iq2Xs, &[], &mut []), Err(Error::Type { quant: Quant::Iq2Xs }));
}
