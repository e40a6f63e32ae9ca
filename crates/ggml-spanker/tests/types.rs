// SPDX-License-Identifier: Apache-2.0
//! Decoding and encoding against vectors of another implementation (`data/README.md`), and encoding against what the
//! steps of each type allow. Products, and what cannot be encoded, are tested elsewhere.

use ggml_spanker::{ENCODE_TYPES, Quant, WEIGHT_TYPES, decode, encode};

const VECTORS: &str = include_str!("data/types.txt");

fn bytes(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().as_chunks::<2>().0.iter();
    let text = digits.map(|pair| std::str::from_utf8(pair).expect("digits"));
    text.map(|pair| u8::from_str_radix(pair, 16).expect("digits")).collect()
}

fn floats(hex: &str) -> Vec<f32> {
    bytes(hex).as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

/// The numbers that were encoded; then type, blocks, what they decode to, and what the numbers become.
fn vectors() -> (Vec<f32>, Vec<(Quant, [&'static str; 3])>) {
    let mut lines = VECTORS.lines().skip(1);
    let values = lines.next().and_then(|line| line.strip_prefix("values ")).expect("values");
    let cases = lines.map(|line| {
        let mut fields = line.split(' ');
        let quant = fields.next().and_then(|name| name.parse().ok()).expect("a type");
        (quant, [(); 3].map(|()| fields.next().expect("four fields")))
    });
    (floats(values), cases.collect())
}

#[test]
fn blocks_of_every_type_decode_to_the_bits_of_another_implementation() {
    let mut seen = Vec::new();
    for (quant, [blocks, decoded, _]) in vectors().1 {
        if blocks == "-" {
            continue;
        }
        let expected = floats(decoded);
        let mut found = vec![f32::NAN; expected.len()];
        decode(quant, &bytes(blocks), &mut found).expect("whole blocks");
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // Zeros are equal, whatever their sign.
            assert_eq!(found, expected, "{quant}, {at}");
        }
        seen.push(quant);
    }
    let in_blocks = WEIGHT_TYPES.into_iter().filter(|quant| quant.block() > 1);
    assert!(in_blocks.clone().all(|quant| seen.contains(&quant)), "{seen:?}");
}

#[test]
fn numbers_become_the_blocks_that_another_implementation_makes_of_them() {
    let (values, cases) = vectors();
    let mut seen = 0;
    for (quant, [_, _, encoded]) in cases {
        if encoded == "-" {
            continue;
        }
        let expected = bytes(encoded);
        let mut found = vec![0xFF; expected.len()];
        encode(quant, &values, &mut found).expect("whole blocks");
        assert_eq!(found, expected, "{quant}");
        seen += 1;
    }
    assert_eq!(seen, 9);
}

/// The root of the mean square of what encoding and decoding changes, as a part of that of the values.
fn loss(quant: Quant, values: &[f32]) -> f64 {
    let mut blocks = vec![0; quant.row_bytes(values.len() as u64) as usize];
    encode(quant, values, &mut blocks).expect("whole blocks");
    let mut back = vec![0.0; values.len()];
    decode(quant, &blocks, &mut back).expect("whole blocks");
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum();
    let off: f64 = square(&mut values.iter().zip(&back).map(|(a, b)| f64::from(a - b)));
    let all: f64 = square(&mut values.iter().map(|value| f64::from(*value)));
    (off / all).sqrt()
}

#[test]
fn encoded_numbers_are_as_near_as_the_bits_of_their_type_allow() {
    let values = &vectors().0[..160];
    let values: Vec<f32> = values.iter().chain(values).copied().take(256).collect();
    for quant in ENCODE_TYPES {
        let bits = match quant {
            Quant::F32 => 24.0,
            Quant::F16 => 11.0,
            Quant::Bf16 => 8.0,
            Quant::Tq1_0 | Quant::Tq2_0 => 0.3,
            Quant::Mxfp4 => 3.0,
            _ => quant.bytes_per_weight() * 8.0 - 0.8,
        };
        let (found, most) = (loss(quant, &values), 2.2 / 2f64.powf(bits));
        assert!(found <= most, "{quant}: {found}, and not {most}");
        // Types with scales lose as little of numbers that are a million times as small, but for the steps of f16.
        if quant != Quant::F16 {
            let small: Vec<f32> = values.iter().map(|value| value * 2f32.powi(-8)).collect();
            let found = loss(quant, &small);
            assert!(found <= 1.3 * most, "{quant}, small: {found}, and not {most}");
        }
    }
}
