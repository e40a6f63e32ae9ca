// SPDX-License-Identifier: Apache-2.0
//! Every collective against a plain serial loop, over types, operations, shapes, threads and
//! alignments.

use std::fmt::Debug;

use half::{bf16, f16};
use proptest::prelude::*;
use spanker_collective::{DType, ReduceOp, chunk};
use spanker_reduce::{
    Element, ReduceError, Team, Threads, all_gather, all_reduce, all_to_all, broadcast, gather,
    reduce, reduce_scatter, scatter,
};

/// A type whose serial fold is written out here, apart from the crate's.
trait Plain: Element {
    fn random(bits: u64) -> Self;
    fn serial(values: &[Self], op: ReduceOp) -> Self;
    fn bits(self) -> u64;
}

macro_rules! plain_float {
    ($type:ty, $wide:ty, $from_bits:expr, $widen:expr, $narrow:expr) => {
        impl Plain for $type {
            fn random(bits: u64) -> Self {
                // Mostly ordinary values, some specials, some arbitrary patterns.
                match bits % 16 {
                    0 => ($narrow)(<$wide>::NAN),
                    1 => ($narrow)(<$wide>::INFINITY),
                    2 => ($narrow)(-0.0),
                    3 => ($narrow)(0.0),
                    4 => ($from_bits)(bits >> 8),
                    _ => ($narrow)(((bits >> 8) % 20001) as $wide / 1000.0 - 10.0),
                }
            }
            fn serial(values: &[Self], op: ReduceOp) -> Self {
                let mut total: $wide = ($widen)(values[0]);
                for &value in &values[1..] {
                    let x: $wide = ($widen)(value);
                    total = match op {
                        ReduceOp::Sum | ReduceOp::Avg => total + x,
                        ReduceOp::Product => total * x,
                        ReduceOp::Max if total.is_nan() || x.is_nan() => <$wide>::NAN,
                        ReduceOp::Min if total.is_nan() || x.is_nan() => <$wide>::NAN,
                        ReduceOp::Max => {
                            if x > total {
                                x
                            } else {
                                total
                            }
                        }
                        ReduceOp::Min => {
                            if x < total {
                                x
                            } else {
                                total
                            }
                        }
                        ReduceOp::LogSumExp if total == x && x.is_infinite() => x,
                        ReduceOp::LogSumExp => {
                            let (a, b) = (f64::from(total), f64::from(x));
                            let high = if a > b { a } else { b };
                            let low = if a > b { b } else { a };
                            (high + (low - high).exp().ln_1p()) as $wide
                        }
                        _ => unreachable!("{op} is for integers"),
                    };
                }
                if op == ReduceOp::Avg {
                    total /= values.len() as $wide;
                }
                ($narrow)(total)
            }
            fn bits(self) -> u64 {
                let value: $wide = ($widen)(self);
                // One NaN is as good as another.
                if value.is_nan() { u64::MAX } else { f64::from(value).to_bits() }
            }
        }
    };
}

plain_float!(f32, f32, |b: u64| f32::from_bits(b as u32), |x| x, |x: f32| x);
plain_float!(f64, f64, |b: u64| f64::from_bits(b), |x| x, |x: f64| x);
plain_float!(f16, f32, |b: u64| f16::from_bits(b as u16), f16::to_f32, |x: f32| f16::from_f32(x));
plain_float!(bf16, f32, |b: u64| bf16::from_bits(b as u16), bf16::to_f32, |x: f32| {
    bf16::from_f32(x)
});

macro_rules! plain_integer {
    ($type:ty) => {
        impl Plain for $type {
            fn random(bits: u64) -> Self {
                bits as $type
            }
            fn serial(values: &[Self], op: ReduceOp) -> Self {
                let total = values[1..].iter().fold(values[0], |total, &x| match op {
                    ReduceOp::Sum | ReduceOp::Avg => total.wrapping_add(x),
                    ReduceOp::Product => total.wrapping_mul(x),
                    ReduceOp::Max => Ord::max(total, x),
                    ReduceOp::Min => Ord::min(total, x),
                    ReduceOp::BitwiseOr => total | x,
                    ReduceOp::BitwiseAnd => total & x,
                    ReduceOp::BitwiseXor => total ^ x,
                    _ => unreachable!("{op} is for floats"),
                });
                if op == ReduceOp::Avg {
                    return (i128::from(total) / values.len() as i128) as $type;
                }
                total
            }
            fn bits(self) -> u64 {
                self as u64
            }
        }
    };
}

plain_integer!(i32);
plain_integer!(i64);
plain_integer!(u8);
plain_integer!(u32);

/// What a case is made of. `skew` moves each card's buffer off its alignment by a different amount.
#[derive(Debug, Clone)]
struct Case {
    cards: usize,
    len: usize,
    skew: usize,
    threads: usize,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let len = prop_oneof![0usize..6, 0usize..700, 20_000usize..90_000];
    (1usize..11, len, 0usize..17, 1usize..5, any::<u64>())
        .prop_map(|(cards, len, skew, threads, seed)| Case { cards, len, skew, threads, seed })
}

fn numbers(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// One buffer for each card, with `skew * card` elements in front that must not change.
fn buffers<T: Plain>(case: &Case) -> Vec<Vec<T>> {
    let mut next = numbers(case.seed);
    (0..case.cards)
        .map(|card| (0..case.len + case.skew * card).map(|_| T::random(next())).collect())
        .collect()
}

fn team() -> &'static Team {
    static TEAM: std::sync::OnceLock<Team> = std::sync::OnceLock::new();
    TEAM.get_or_init(|| Team::new(4))
}

fn check_all_reduce<T: Plain + Debug>(case: &Case) -> Result<(), TestCaseError> {
    for op in ReduceOp::ALL.into_iter().filter(|op| op.is_defined_for(T::DTYPE)) {
        if op == ReduceOp::LogSumExp && case.len > 2000 {
            continue;
        }
        let before = buffers::<T>(case);
        let mut after = before.clone();
        let mut views: Vec<&mut [T]> =
            after.iter_mut().enumerate().map(|(c, b)| &mut b[case.skew * c..]).collect();
        all_reduce(team(), Threads::Exactly(case.threads), &mut views, op).unwrap();
        for i in 0..case.len {
            let column: Vec<T> = (0..case.cards).map(|c| before[c][case.skew * c + i]).collect();
            let expected = T::serial(&column, op);
            for (card, buffer) in after.iter().enumerate() {
                let found = buffer[case.skew * card + i];
                let same = found.bits() == expected.bits();
                prop_assert!(same, "{} {op} {column:?}: {found:?} {expected:?}", T::DTYPE);
            }
        }
        for (card, buffer) in after.iter().enumerate() {
            let (old, new) = (&before[card][..case.skew * card], &buffer[..case.skew * card]);
            let same = old.iter().zip(new).all(|(a, b)| a.bits() == b.bits());
            prop_assert!(same, "elements in front of card {card} changed");
        }
    }
    Ok(())
}

fn check_others<T: Plain>(case: &Case) -> Result<(), TestCaseError> {
    let (n, threads) = (case.cards, Threads::Exactly(case.threads));
    let inputs: Vec<Vec<T>> = buffers::<T>(&Case { skew: 0, ..case.clone() }).into_iter().collect();
    let bits = |values: &[T]| values.iter().map(|v| v.bits()).collect::<Vec<_>>();
    let zero = || T::random(8);

    let folded: Vec<T> = (0..case.len)
        .map(|i| T::serial(&inputs.iter().map(|b| b[i]).collect::<Vec<_>>(), ReduceOp::Sum))
        .collect();
    let mut output = vec![zero(); case.len];
    reduce(team(), threads, &inputs, &mut output, ReduceOp::Sum).unwrap();
    prop_assert_eq!(bits(&output), bits(&folded));

    let mut outputs: Vec<Vec<T>> =
        (0..n).map(|c| vec![zero(); chunk(case.len, n, c).len()]).collect();
    reduce_scatter(team(), threads, &inputs, &mut outputs, ReduceOp::Sum).unwrap();
    prop_assert_eq!(bits(&outputs.concat()), bits(&folded));

    scatter(team(), threads, &inputs[0], &mut outputs).unwrap();
    prop_assert_eq!(bits(&outputs.concat()), bits(&inputs[0]));

    let mut wide: Vec<Vec<T>> = vec![vec![zero(); case.len]; n];
    all_gather(team(), threads, &outputs, &mut wide).unwrap();
    for output in &wide {
        prop_assert_eq!(bits(output), bits(&inputs[0]));
    }
    gather(team(), threads, &outputs, &mut wide[0]).unwrap();
    prop_assert_eq!(bits(&wide[0]), bits(&inputs[0]));
    broadcast(team(), threads, &inputs[n - 1], &mut wide).unwrap();
    for output in &wide {
        prop_assert_eq!(bits(output), bits(&inputs[n - 1]));
    }

    let mut blocks: Vec<Vec<T>> =
        (0..n).map(|c| vec![zero(); chunk(case.len, n, c).len() * n]).collect();
    all_to_all(team(), threads, &inputs, &mut blocks).unwrap();
    for (card, output) in blocks.iter().enumerate() {
        let expected: Vec<T> =
            inputs.iter().flat_map(|b| b[chunk(case.len, n, card)].to_vec()).collect();
        prop_assert_eq!(bits(output), bits(&expected));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn all_reduce_has_the_bits_of_the_serial_fold(case in cases()) {
        check_all_reduce::<f32>(&case)?;
        check_all_reduce::<f64>(&case)?;
        check_all_reduce::<f16>(&case)?;
        check_all_reduce::<bf16>(&case)?;
        check_all_reduce::<i32>(&case)?;
        check_all_reduce::<i64>(&case)?;
        check_all_reduce::<u8>(&case)?;
        check_all_reduce::<u32>(&case)?;
    }

    #[test]
    fn the_other_collectives_match_plain_loops(case in cases()) {
        check_others::<f32>(&case)?;
        check_others::<bf16>(&case)?;
        check_others::<i64>(&case)?;
        check_others::<u8>(&case)?;
    }
}

#[test]
fn all_reduce_over_more_than_64_cards_matches_the_serial_fold() {
    let case = Case { cards: 130, len: 1000, skew: 1, threads: 2, seed: 7 };
    check_all_reduce::<f32>(&case).unwrap();
    check_all_reduce::<u8>(&case).unwrap();
    let case = Case { cards: 300, len: 40, ..case };
    check_all_reduce::<u8>(&case).unwrap();
}

#[test]
fn unequal_lengths_name_the_first_card_that_differs_and_change_nothing() {
    let mut cards = vec![vec![1.0f32; 4], vec![2.0; 4], vec![3.0; 3], vec![4.0; 5]];
    let before = cards.clone();
    let error = all_reduce(Team::global(), Threads::Auto, &mut cards, ReduceOp::Sum);
    assert_eq!(error, Err(ReduceError::Length { card: 2, expected: 4, actual: 3 }));
    assert_eq!(cards, before);
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "card 2: buffer has 3 elements, expected 4");
}

#[test]
fn an_illegal_pair_is_a_typed_error_that_changes_nothing() {
    let mut cards = vec![vec![f16::ONE], vec![f16::ONE]];
    let error = all_reduce(Team::global(), Threads::Auto, &mut cards, ReduceOp::BitwiseXor);
    let (op, dtype) = (ReduceOp::BitwiseXor, DType::F16);
    assert_eq!(error, Err(ReduceError::Undefined { op, dtype }));
    assert_eq!(cards, [[f16::ONE], [f16::ONE]]);
    let mut cards = vec![vec![1u8], vec![2]];
    let error = all_reduce(Team::global(), Threads::Auto, &mut cards, ReduceOp::LogSumExp);
    assert_eq!(error.unwrap_err().to_string(), "operation logsumexp is not defined for u8");
}

#[test]
fn no_cards_and_no_elements_are_legal() {
    let mut none: Vec<Vec<f32>> = Vec::new();
    all_reduce(Team::global(), Threads::Auto, &mut none, ReduceOp::Sum).unwrap();
    let mut empty = vec![Vec::<f32>::new(); 3];
    all_reduce(Team::global(), Threads::Auto, &mut empty, ReduceOp::Sum).unwrap();
    let none: [&[f32]; 0] = [];
    reduce(Team::global(), Threads::Auto, &none, &mut [], ReduceOp::Sum).unwrap();
    let mut outputs: Vec<Vec<f32>> = Vec::new();
    scatter(Team::global(), Threads::Auto, &[1.0], &mut outputs).unwrap();
}

/// A buffer that gives another slice each time it is asked.
struct Fickle {
    long: Vec<f32>,
    asked: usize,
}

impl AsMut<[f32]> for Fickle {
    fn as_mut(&mut self) -> &mut [f32] {
        self.asked += 1;
        if self.asked > 1 { &mut [] } else { &mut self.long }
    }
}

#[test]
fn a_buffer_that_changes_its_mind_is_asked_once() {
    let fickle =
        || vec![Fickle { long: vec![0.0; 32], asked: 0 }, Fickle { long: vec![0.0; 32], asked: 0 }];
    let inputs = [vec![1.0f32; 64], vec![2.0; 64]];
    let (team, auto) = (Team::global(), Threads::Auto);
    let mut outputs = fickle();
    reduce_scatter(team, auto, &inputs, &mut outputs, ReduceOp::Sum).unwrap();
    assert!(outputs.iter().all(|output| output.asked == 1 && output.long == [3.0; 32]));
    let mut outputs = fickle();
    scatter(team, auto, &inputs[0], &mut outputs).unwrap();
    assert!(outputs.iter().all(|output| output.asked == 1 && output.long == [1.0; 32]));
    let mut outputs = fickle();
    all_gather(team, auto, &[&inputs[0][..16], &inputs[1][..16]], &mut outputs).unwrap();
    assert!(outputs.iter().all(|output| output.asked == 1));
    let mut outputs = fickle();
    all_to_all(team, auto, &[&inputs[0][..32], &inputs[1][..32]], &mut outputs).unwrap();
    assert!(outputs.iter().all(|output| output.asked == 1));
    let mut cards = fickle();
    all_reduce(team, auto, &mut cards, ReduceOp::Sum).unwrap();
    assert!(cards.iter().all(|card| card.asked == 1));
}
