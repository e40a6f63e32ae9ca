// SPDX-License-Identifier: Apache-2.0
//! Operators, blocks and products against vectors that numpy made (`oracle/make_vectors.py`), which shares no
//! code with them.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/stored.rs"]
mod stored;

use ggml_spanker::ops::{self, AttendScratch, KvView, Pairs, Queries};
use ggml_spanker::{Inputs, KvShape, Quant, WEIGHT_TYPES, decode, multiply, quantize};
use serde_json::Value;
use spanker_model::Activation;

use stored::{bytes, doubles, floats, list, size};

fn operators() -> Value {
    serde_json::from_str(include_str!("vectors/operators.json")).expect("JSON")
}

/// Every number within `part` of the largest expected magnitude.
fn assert_near(what: &str, found: &[f32], expected: &[f64], part: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let most = expected.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(*found) - expected).abs();
        assert!(off <= part * most, "{what}, {at}: {found} and not {expected}, of {most}");
    }
}

/// A few roundings of f32.
const ROUNDINGS: f64 = 4.0 * f32::EPSILON as f64;

#[test]
fn norm_of_stored_rows_is_that_of_numpy() {
    for case in list(&operators()["norm"]) {
        let (row, weight) = (floats(&case["row"]), floats(&case["weight"]));
        let mut out = vec![0.0; row.len()];
        ops::norm(&row, &weight, 1e-5, &mut out);
        assert_near(&format!("width {}", row.len()), &out, &doubles(&case["out"]), ROUNDINGS);
    }
}

#[test]
fn rotation_of_both_pairings_is_that_of_numpy() {
    for case in list(&operators()["rotate"]) {
        let pairs = match case["pairs"].as_str() {
            Some("adjacent") => Pairs::Adjacent,
            _ => Pairs::Halves,
        };
        let (mut row, table) = (floats(&case["row"]), floats(&case["table"]));
        let head = size(case, "head_size");
        let what = format!("{pairs:?}, {} of {head}", table.len());
        ops::rotate(&mut row, head, &table, pairs);
        assert_near(&what, &row, &doubles(&case["out"]), ROUNDINGS);
    }
}

/// Attention of all heads, those that share keys together.
fn attend_all(
    queries: &[f32],
    keys: &[u8],
    values: &[u8],
    sizes: [usize; 4],
    scale: f32,
) -> Vec<f32> {
    let [heads, kv_heads, head_size, positions] = sizes;
    let (group, width) = (heads / kv_heads, kv_heads * head_size);
    let shape = KvShape { heads: kv_heads as u64, head_size: head_size as u64, quant: Quant::F16 };
    let halves = |bytes: &[u8], position: usize| -> Vec<f32> {
        let row = &bytes[2 * position * width..2 * (position + 1) * width];
        let mut out = vec![0.0; width];
        decode(Quant::F16, row, &mut out).expect("whole rows");
        out
    };
    let (blocks, size) = (positions.div_ceil(64), shape.block_bytes() as usize);
    let mut cache = vec![0; blocks * size];
    for position in 0..positions {
        let block = &mut cache[position / 64 * size..][..size];
        ops::keep(shape, position, &halves(keys, position), &halves(values, position), block);
    }
    let table: Vec<u32> = (0..blocks as u32).collect();
    let mut out = vec![0.0; queries.len()];
    let each = group * head_size;
    for (head, (rows, out)) in queries.chunks(each).zip(out.chunks_mut(each)).enumerate() {
        let queries = Queries::plain(rows, group, positions - 1, scale);
        let view = KvView { cache: &cache, table: &table, shape, head };
        ops::attend(queries, view, &mut AttendScratch::default(), out);
    }
    out
}

#[test]
fn attention_of_grouped_heads_is_that_of_numpy() {
    for case in list(&operators()["attend"]) {
        let sizes = ["heads", "kv_heads", "head_size", "positions"].map(|field| size(case, field));
        let (keys, values) = (bytes(&case["keys"]), bytes(&case["values"]));
        let scale = case["scale"].as_f64().expect("a scale") as f32;
        let out = attend_all(&floats(&case["queries"]), &keys, &values, sizes, scale);
        // Scores of some units, rounded to f32 with sums of up to 32, become factors of shares.
        assert_near(&format!("{sizes:?}"), &out, &doubles(&case["out"]), 8.0 * ROUNDINGS);
    }
}

#[test]
fn shares_of_scores_are_the_softmax_of_numpy() {
    const ONE: [u8; 2] = [0x00, 0x3c];
    for case in list(&operators()["softmax"]) {
        let scores = bytes(&case["scores"]);
        let positions = scores.len() / 2;
        // A key's first number is its score; a value shows the share of its own position.
        let (mut keys, mut values) = (vec![0; positions * 64], vec![0; positions * 64]);
        for at in 0..positions {
            keys[at * 64..at * 64 + 2].copy_from_slice(&scores[2 * at..2 * at + 2]);
            values[at * 66..at * 66 + 2].copy_from_slice(&ONE);
        }
        let mut query = vec![0.0; 32];
        query[0] = 1.0;
        let out = attend_all(&query, &keys, &values, [1, 1, 32, positions], 1.0);
        assert_near("shares", &out[..positions], &doubles(&case["out"]), 2.0 * ROUNDINGS);
        assert!(out[positions..].iter().all(|share| *share == 0.0));
    }
}

#[test]
fn gate_is_that_of_numpy() {
    let case = &operators()["gate"];
    let (gate, up) = (floats(&case["gate"]), floats(&case["up"]));
    let mut out = vec![0.0; gate.len()];
    ops::gate(Activation::Silu, &gate, &up, &mut out);
    for (at, (found, expected)) in out.iter().zip(doubles(&case["out"])).enumerate() {
        let off = (f64::from(*found) - expected).abs();
        // Below -87.3 the gate is shut, which is less than the smallest normal number away.
        assert!(
            off <= 2.0 * ROUNDINGS * expected.abs() + 1e-35,
            "{at}: {found} and not {expected}"
        );
    }
}

#[test]
fn exponentials_are_those_of_numpy_within_two_units() {
    let case = &operators()["exp"];
    for (x, expected) in floats(&case["x"]).into_iter().zip(doubles(&case["out"])) {
        let off = (f64::from(ops::exp(x)) - expected).abs();
        let unit = expected * f64::from(f32::EPSILON);
        assert!(off <= 2.0 * unit, "e^{x}: off by {} units", off / unit);
    }
}

/// The rows of weights of a type, as blocks and as numbers.
struct Weights {
    quant: Quant,
    blocks: Vec<u8>,
    values: Vec<f32>,
}

fn weights(case: &Value, count: usize) -> Weights {
    let quant: Quant = case["quant"].as_str().expect("a type").parse().expect("a type");
    let blocks = bytes(&case["blocks"]);
    let mut values = vec![0.0; count];
    decode(quant, &blocks, &mut values).expect("whole blocks");
    Weights { quant, blocks, values }
}

fn stored_weights() -> Value {
    serde_json::from_str(include_str!("vectors/weights.json")).expect("JSON")
}

#[test]
fn blocks_of_every_type_decode_to_the_values_of_numpy() {
    let stored = stored_weights();
    let count = size(&stored, "rows") * size(&stored, "cols");
    let mut seen = Vec::new();
    for case in list(&stored["types"]) {
        let Weights { quant, values, .. } = weights(case, count);
        let expected = floats(&case["decoded"]);
        for (at, (found, expected)) in values.iter().zip(&expected).enumerate() {
            // Zeros are equal, whatever their sign.
            assert_eq!(found, expected, "{quant}, {at}");
        }
        let sum: f64 = values.iter().map(|value| f64::from(*value)).sum();
        let all = case["sum"].as_f64().expect("a sum");
        assert!((sum - all).abs() <= 1e-9 * all.abs(), "{quant}: {sum} and not {all}");
        seen.push(quant);
    }
    // Those that are unpacked before they are multiplied are in ggml-spanker's tests.
    let mut types = WEIGHT_TYPES.into_iter().take_while(|quant| *quant != Quant::Q2K);
    assert!(types.all(|quant| seen.contains(&quant)), "{seen:?}");
}

/// How far a product may be off: each activation by half a step of its block and, with a scale of 16 bits,
/// by half a unit of that; and the roundings of the sum.
fn bound(weights: &[f32], activations: &[f32], input: Quant) -> f64 {
    let block = input.block() as usize;
    let mut off = 0.0;
    for (weights, values) in weights.chunks(block).zip(activations.chunks(block)) {
        let most = values.iter().fold(0.0f64, |most, value| most.max(f64::from(value.abs())));
        for (weight, value) in weights.iter().zip(values) {
            let rounded = match input {
                Quant::F32 => 0.0,
                Quant::Q8_0 => most / 254.0 + f64::from(value.abs()) / 2048.0,
                _ => most / 254.0,
            };
            off += f64::from(weight.abs()) * rounded;
        }
    }
    off * 1.001
}

#[test]
fn products_of_every_type_are_those_of_numpy() {
    let stored = stored_weights();
    let (rows, cols) = (size(&stored, "rows"), size(&stored, "cols"));
    for case in list(&stored["types"]) {
        let Weights { quant, blocks, values } = weights(case, rows * cols);
        let input = quant.input();
        let expected = doubles(&case["products"]);
        for (which, activations) in list(&stored["activations"]).iter().enumerate() {
            let activations = floats(activations);
            let mut row = vec![0; input.row_bytes(cols as u64) as usize];
            quantize(input, &activations, &mut row).expect("whole blocks");
            let mut inputs = Inputs::new();
            inputs.load(input, &row, 1, cols).expect("a row");
            let mut out = vec![0.0; rows];
            multiply(quant, &blocks, rows, &inputs, &mut out).expect("a product");
            for (at, found) in out.iter().enumerate() {
                let weights = &values[at * cols..(at + 1) * cols];
                let terms = weights.iter().zip(&activations);
                let size: f64 = terms.map(|(a, b)| f64::from(a * b).abs()).sum();
                // The first row of activations is one that 8 bits hold exactly.
                let inexact = if which == 0 { 0.0 } else { bound(weights, &activations, input) };
                let expected = expected[which * rows + at];
                let off = (f64::from(*found) - expected).abs();
                let most = inexact + size * 4.0 * ROUNDINGS;
                assert!(off <= most, "{quant}, {which}/{at}: {found} and not {expected} +- {most}");
            }
        }
    }
}
