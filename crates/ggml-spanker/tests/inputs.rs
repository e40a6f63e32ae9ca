// SPDX-License-Identifier: Apache-2.0
//! Activations as 8-bit blocks, against one value at a time.

use ggml_spanker::{Inputs, Quant, multiply, quantize};
use half::f16;
use proptest::prelude::*;

/// What the documentation of `quantize` says, in the plainest words.
fn expected(values: &[f32]) -> (f32, Vec<i8>) {
    if values.iter().any(|value| !value.is_finite()) {
        return (f32::NAN, vec![0; values.len()]);
    }
    let largest = values.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
    if largest == 0.0 {
        return (0.0, vec![0; values.len()]);
    }
    let round = |value: &f32| (value * (127.0 / largest)).round_ties_even().clamp(-127.0, 127.0);
    (largest / 127.0, values.iter().map(|value| round(value) as i8).collect())
}

fn number() -> impl Strategy<Value = f32> {
    prop_oneof![200 => -3.0f32..3.0, 20 => Just(0.0), 5 => -1e-40f32..1e-40, 1 => any::<f32>()]
}

proptest! {
    #[test]
    fn block_of_any_values_is_their_scale_and_nearest_multiples(
        values in prop::collection::vec(number(), 256),
    ) {
        let mut short = [0; 8 * 34];
        quantize(Quant::Q8_0, &values, &mut short).expect("whole blocks");
        for (block, values) in short.chunks_exact(34).zip(values.chunks_exact(32)) {
            let (scale, quants) = expected(values);
            let found: Vec<i8> = block[2..].iter().map(|&byte| byte as i8).collect();
            prop_assert_eq!(&block[..2], &f16::from_f32_const(scale).to_le_bytes());
            prop_assert_eq!(found, quants);
        }
        let mut long = [0; 292];
        quantize(Quant::Q8K, &values, &mut long).expect("whole blocks");
        let (scale, quants) = expected(&values);
        prop_assert_eq!(&long[..4], &scale.to_le_bytes());
        let found: Vec<i8> = long[4..260].iter().map(|&byte| byte as i8).collect();
        prop_assert_eq!(&found, &quants);
        for (sum, part) in long[260..].chunks_exact(2).zip(quants.chunks_exact(16)) {
            let total: i16 = part.iter().map(|&quant| i16::from(quant)).sum();
            prop_assert_eq!(sum, &total.to_le_bytes());
        }
    }
}

#[test]
fn rows_loaded_in_units_have_the_products_of_rows_by_themselves() {
    const ROWS: usize = 40;
    for (weights, blocks) in [(Quant::Q4_0, 12), (Quant::Q2K, 9)] {
        let (input, width) = (weights.input(), blocks * weights.block() as usize);
        let value = |i: usize| ((i * 37 + i / 5) % 101) as f32 / 50.0 - 1.0;
        let values: Vec<f32> = (0..ROWS * width).map(value).collect();
        let row = input.row_bytes(width as u64) as usize;
        let mut bytes = vec![0; ROWS * row];
        quantize(input, &values, &mut bytes).expect("whole blocks");
        let matrix: Vec<u8> = (0..weights.row_bytes(width as u64) as usize)
            .map(|i| (i * 29 % 128) as u8 & 0x3F)
            .collect();
        let products = |inputs: &Inputs| {
            let mut out = vec![0.0; inputs.rows()];
            multiply(weights, &matrix, 1, inputs, &mut out).expect("lengths belong together");
            out
        };
        let load = |units_left_out: usize| {
            let (mut inputs, mut count) = (Inputs::new(), 0);
            let loaded = inputs.load_shared(input, &bytes, (ROWS, width), |units, work| {
                count = units;
                (units_left_out..units).rev().for_each(work);
            });
            loaded.expect("whole rows");
            (products(&inputs), count)
        };
        let mut alone = Vec::new();
        for bytes in bytes.chunks_exact(row) {
            let mut inputs = Inputs::new();
            inputs.load(input, bytes, 1, width).expect("whole rows");
            alone.extend(products(&inputs));
        }
        assert!(load(0).1 > 1, "several units");
        assert_eq!(load(0).0, alone, "{weights}");
        assert_ne!(load(1).0, alone, "{weights}: a unit that nobody does is missed");
    }
}
