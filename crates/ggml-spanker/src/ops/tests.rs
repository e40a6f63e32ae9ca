// SPDX-License-Identifier: Apache-2.0
//! Operators on every path against the one without vector instructions, bit for bit.

use proptest::prelude::*;

use spanker_model::Activation;

use super::{Pairs, body, gate, scale};
use crate::path::Path;
use crate::simd::{Lanes, Work, run_on};

/// Any f32 that a model may contain, and some that it should not.
fn number() -> impl Strategy<Value = f32> {
    prop_oneof![
        20 => -20.0f32..20.0,
        2 => -1e30f32..1e30,
        1 => any::<f32>(),
        1 => prop_oneof![Just(0.0), Just(-0.0), Just(f32::NAN), Just(f32::INFINITY)],
    ]
}

fn row(len: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(number(), len)
}

/// Bits, with one pattern for all that is not a number.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

/// What `compute` writes is the same on every path.
fn assert_same(compute: impl Fn(Path) -> Vec<f32>) -> Result<(), TestCaseError> {
    let expected = bits(&compute(Path::Portable));
    for path in Path::available() {
        prop_assert_eq!(bits(&compute(path)), expected.clone(), "by {}", path);
    }
    Ok(())
}

fn filled(len: usize, write: impl FnOnce(&mut [f32])) -> Vec<f32> {
    let mut out = vec![7.0; len];
    write(&mut out);
    out
}

proptest! {
    #[test]
    fn operators_on_rows_have_the_same_bits_on_every_path(one in row(1..70), other in row(70..71)) {
        let (a, len) = (&one[..], one.len());
        let b = &other[..len];
        assert_same(|path| vec![on_path!(path, dot(a: &'a [f32], b: &'a [f32]) -> f32)])?;
        assert_same(|path| filled(len, |out| {
            let epsilon = 1e-5;
            on_path!(path, norm(a: &'a [f32], b: &'a [f32], epsilon: f32, out: &'a mut [f32]) -> ());
        }))?;
        for kind in Activation::ALL {
            assert_same(|path| filled(len, |out| {
                on_path!(path, gate(kind: Activation, a: &'a [f32], b: &'a [f32], out: &'a mut [f32]) -> ());
            }))?;
        }
        assert_same(|path| {
            let mut copy = one.clone();
            let (out, factor, cap) = (&mut copy[..], 1.5, 30.0);
            on_path!(path, scale(out: &'a mut [f32], factor: f32, cap: f32) -> ());
            copy
        })?;
        assert_same(|path| filled(len, |out| {
            on_path!(path, add(out: &'a mut [f32], b: &'a [f32]) -> ());
        }))?;
    }

    #[test]
    fn rotation_has_the_same_bits_on_every_path(row in row(96..97), table in row(32..33), turns in 0..16usize) {
        let table = &table[..2 * turns];
        let head_size = 32;
        for pairs in [Pairs::Adjacent, Pairs::Halves] {
            assert_same(|path| {
                let mut copy = row.clone();
                let row = &mut copy[..];
                on_path!(path, rotate(row: &'a mut [f32], head_size: usize, table: &'a [f32], pairs: Pairs) -> ());
                copy
            })?;
        }
    }

    #[test]
    fn halves_and_largest_are_the_same_on_every_path(values in row(0..150), k in 0..9usize) {
        let values = &values[..];
        let half = |path| {
            let mut bytes = vec![0; 2 * values.len()];
            let out = &mut bytes[..];
            on_path!(path, to_half(values: &'a [f32], out: &'a mut [u8]) -> ());
            bytes
        };
        let largest = |path| {
            let found = on_path!(path, best(values: &'a [f32], k: usize) -> Vec<(u32, f32)>);
            found.into_iter().map(|(place, value)| (place, value.to_bits())).collect::<Vec<_>>()
        };
        for path in Path::available() {
            prop_assert_eq!(half(path), half(Path::Portable), "by {}", path);
            prop_assert_eq!(largest(path), largest(Path::Portable), "by {}", path);
        }
    }
}

#[test]
fn gates_and_caps_are_near_their_definitions() {
    let values: Vec<f32> = (-400..400).map(|at| at as f32 * 0.05).collect();
    let ups: Vec<f32> = values.iter().rev().copied().collect();
    for kind in Activation::ALL {
        let mut out = vec![0.0; values.len()];
        gate(kind, &values, &ups, &mut out);
        for ((out, &gate), &up) in out.iter().zip(&values).zip(&ups) {
            let (gate, up) = (f64::from(gate), f64::from(up));
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let right = match kind {
                Activation::Gelu => {
                    gate * (1.0 + (root * (gate + 0.044_715 * gate.powi(3))).tanh()) / 2.0 * up
                }
                Activation::ClampedSilu => {
                    let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
                    gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
                }
                _ => gate / (1.0 + (-gate).exp()) * up,
            };
            assert!(
                (f64::from(*out) - right).abs() <= 1e-5 * (1.0 + right.abs()),
                "{kind:?} {gate}"
            );
        }
    }
    let mut scaled = values.clone();
    scale(&mut scaled, 3.0, 30.0);
    for (out, value) in scaled.iter().zip(&values) {
        let right = 30.0 * (f64::from(*value) * 3.0 / 30.0).tanh();
        assert!((f64::from(*out) - right).abs() < 1e-5, "{value}: {out} where {right} is right");
    }
    let mut plain = values.clone();
    scale(&mut plain, 0.5, 0.0);
    assert!(plain.iter().zip(&values).all(|(out, value)| *out == value * 0.5));
}

#[test]
fn best_of_many_is_what_sorting_finds() {
    let values: Vec<f32> =
        (0..5000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as f32).collect();
    let mut sorted: Vec<(u32, f32)> =
        values.iter().enumerate().map(|(i, v)| (i as u32, *v)).collect();
    sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    assert_eq!(super::best(&values, 40), sorted[..40]);
}
