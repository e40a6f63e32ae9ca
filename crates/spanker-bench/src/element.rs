// SPDX-License-Identifier: Apache-2.0
//! Inputs whose results are exact in every type and order, and what the results must be.
//!
//! The expected values are computed here from scratch, without the library's arithmetic.

use spanker_scheduler::{Collective, Element, ReduceOp, bf16, chunk, f16};

use crate::collective::Case;

/// An element type that a bench can fill and check.
pub trait BenchElement: Element + Default {
    /// What `card` of `cards` contributes to `element`: small, and for products a sign or, from one
    /// card, a two.
    fn input(op: ReduceOp, cards: usize, card: usize, element: usize) -> Self;

    /// Whether `found` is the reduction of what all cards contribute to `element`.
    fn is_reduction(found: Self, op: ReduceOp, cards: usize, element: usize) -> bool;

    /// Plain arithmetic for the original loop. `None` where it has no such operation.
    fn origin_all_reduce(op: ReduceOp) -> Option<Origin<Self>>;

    /// An ordinary number from random bits: a float between -1 and 1, any integer.
    fn ordinary(bits: u64) -> Self;

    /// Any pattern of bits.
    fn pattern(bits: u64) -> Self;

    /// The value as a double and the distance of floats of this type after 1; nothing for integers.
    fn float(self) -> Option<(f64, f64)>;
}

/// The original all-reduce, for one type and operation.
pub type Origin<T> = fn(&mut [Buffer<T>]);

/// Scrambles card and element into bits that look random.
pub(crate) fn scramble(card: usize, element: usize) -> u64 {
    let mut z = (card as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ element as u64;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn float_input(op: ReduceOp, cards: usize, card: usize, element: usize) -> f64 {
    let draw = scramble(card, element);
    match op {
        ReduceOp::Product if card == element % cards => 2.0,
        ReduceOp::Product => [1.0, -1.0][(draw % 2) as usize],
        _ => (draw % 5) as f64 - 2.0,
    }
}

fn float_reduction(op: ReduceOp, cards: usize, element: usize) -> f64 {
    let inputs = || (0..cards).map(|card| float_input(op, cards, card, element));
    match op {
        ReduceOp::Sum => inputs().sum(),
        ReduceOp::Avg => inputs().sum::<f64>() / cards as f64,
        ReduceOp::Product => inputs().product(),
        ReduceOp::Max => inputs().fold(f64::NEG_INFINITY, f64::max),
        ReduceOp::Min => inputs().fold(f64::INFINITY, f64::min),
        _ => inputs().map(f64::exp).sum::<f64>().ln(),
    }
}

macro_rules! float_sample {
    ($type:ty, $bits:ty, $from:expr, $tolerance:expr) => {
        impl BenchElement for $type {
            fn ordinary(bits: u64) -> Self {
                ($from)((bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
            }
            fn pattern(bits: u64) -> Self {
                <$type>::from_bits(bits as $bits)
            }
            fn float(self) -> Option<(f64, f64)> {
                Some((f64::from(self), f64::from(<$type>::EPSILON)))
            }
            fn input(op: ReduceOp, cards: usize, card: usize, element: usize) -> Self {
                ($from)(float_input(op, cards, card, element))
            }
            fn is_reduction(found: Self, op: ReduceOp, cards: usize, element: usize) -> bool {
                let expected = float_reduction(op, cards, element);
                if op == ReduceOp::LogSumExp {
                    let error = (f64::from(found) - expected).abs();
                    return error <= $tolerance * cards as f64 * expected.abs().max(1.0);
                }
                found == ($from)(expected)
            }
            fn origin_all_reduce(op: ReduceOp) -> Option<Origin<Self>> {
                Some(match op {
                    ReduceOp::Sum => |b| all_reduce(b, |a, x| a + x, |total, _| total),
                    ReduceOp::Avg => {
                        |b| all_reduce(b, |a, x| a + x, |total, n| total / ($from)(n as f64))
                    }
                    ReduceOp::Max => |b| all_reduce(b, |a, x| if x > a { x } else { a }, |t, _| t),
                    ReduceOp::Min => |b| all_reduce(b, |a, x| if x < a { x } else { a }, |t, _| t),
                    _ => return None,
                })
            }
        }
    };
}

float_sample!(f32, u32, |x: f64| x as f32, 1e-6);
float_sample!(f64, u64, |x: f64| x, 1e-14);
float_sample!(f16, u16, f16::from_f64, 1e-3);
float_sample!(bf16, u16, bf16::from_f64, 1e-2);

fn integer_input(card: usize, element: usize) -> i64 {
    (scramble(card, element) % 7) as i64
}

macro_rules! integer_sample {
    ($type:ty) => {
        impl BenchElement for $type {
            fn ordinary(bits: u64) -> Self {
                bits as $type
            }
            fn pattern(bits: u64) -> Self {
                bits as $type
            }
            fn float(self) -> Option<(f64, f64)> {
                None
            }
            fn input(_op: ReduceOp, _cards: usize, card: usize, element: usize) -> Self {
                integer_input(card, element) as $type
            }
            fn is_reduction(found: Self, op: ReduceOp, cards: usize, element: usize) -> bool {
                // Wrapping at 64 bits and cutting off is wrapping at the type's own width.
                let total = (1..cards).map(|card| integer_input(card, element)).fold(
                    integer_input(0, element),
                    |total, x| match op {
                        ReduceOp::Product => total.wrapping_mul(x),
                        ReduceOp::Max => total.max(x),
                        ReduceOp::Min => total.min(x),
                        ReduceOp::BitwiseOr => total | x,
                        ReduceOp::BitwiseAnd => total & x,
                        ReduceOp::BitwiseXor => total ^ x,
                        _ => total.wrapping_add(x),
                    },
                ) as $type;
                match op {
                    ReduceOp::Avg => i128::from(found) == i128::from(total) / cards as i128,
                    _ => found == total,
                }
            }
            fn origin_all_reduce(op: ReduceOp) -> Option<Origin<Self>> {
                Some(match op {
                    ReduceOp::Sum => |b| all_reduce(b, |a, x| a.wrapping_add(x), |t, _| t),
                    ReduceOp::Max => |b| all_reduce(b, |a, x| a.max(x), |t, _| t),
                    ReduceOp::Min => |b| all_reduce(b, |a, x| a.min(x), |t, _| t),
                    _ => return None,
                })
            }
        }
    };
}

integer_sample!(i32);
integer_sample!(i64);
integer_sample!(u8);
integer_sample!(u32);

/// A card's buffer, on a page boundary as a card's driver would map it.
#[derive(Debug)]
pub struct Buffer<T> {
    storage: Vec<T>,
    start: usize,
    len: usize,
}

const PAGE: usize = 4096;

impl<T: BenchElement> Buffer<T> {
    pub(crate) fn new(len: usize) -> Self {
        let storage = vec![T::default(); len + PAGE / size_of::<T>()];
        let start = storage.as_ptr().align_offset(PAGE);
        Buffer { storage, start, len }
    }

    /// One buffer of `len` for each of `count` cards.
    pub(crate) fn group(count: usize, len: usize) -> Vec<Self> {
        (0..count).map(|_| Buffer::new(len)).collect()
    }
}

impl<T> AsRef<[T]> for Buffer<T> {
    fn as_ref(&self) -> &[T] {
        &self.storage[self.start..self.start + self.len]
    }
}

impl<T> AsMut<[T]> for Buffer<T> {
    fn as_mut(&mut self) -> &mut [T] {
        &mut self.storage[self.start..self.start + self.len]
    }
}

/// The all-reduce that the first version ran, after its transposition (the element-outer loop before that is timed by the
/// example `transposition` of `spanker-reduce`): fold card after card into a fresh buffer, finish it, copy it to each card.
#[inline(always)]
fn all_reduce<T: BenchElement>(
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

/// The all-gather that it ran: append card after card to a fresh buffer, copy it to each card.
pub(crate) fn origin_all_gather<T: BenchElement>(inputs: &[Buffer<T>], outputs: &mut [Buffer<T>]) {
    let mut gathered = Vec::with_capacity(inputs.iter().map(|input| input.as_ref().len()).sum());
    for input in inputs {
        gathered.extend_from_slice(input.as_ref());
    }
    for output in outputs {
        output.as_mut().copy_from_slice(&gathered);
    }
}

/// Writes what a card contributes to the elements from `first` on.
pub(crate) fn fill<T: BenchElement>(case: &Case, card: usize, first: usize, data: &mut [T]) {
    for (i, value) in data.iter_mut().enumerate() {
        *value = T::input(case.op, case.ranks, card, first + i);
    }
}

/// Counts the elements of `data` that are not what the collective over buffers of `len` promises to a rank, in place.
pub(crate) fn count_wrong<T: BenchElement>(
    case: &Case,
    len: usize,
    rank: usize,
    data: &[T],
) -> usize {
    let Case { collective, op, ranks: cards, .. } = *case;
    let mine = chunk(len, cards, rank);
    let reduced = |range: std::ops::Range<usize>| {
        range.filter(|&i| !T::is_reduction(data[i], op, cards, i)).count()
    };
    let gathered = || {
        (0..cards)
            .flat_map(|owner| chunk(len, cards, owner).map(move |i| (owner, i)))
            .filter(|&(owner, i)| data[i] != T::input(op, cards, owner, i))
            .count()
    };
    let copied = |range: std::ops::Range<usize>, root: usize| {
        range.filter(|&i| data[i] != T::input(op, cards, root, i)).count()
    };
    match collective {
        Collective::AllReduce => reduced(0..len),
        Collective::ReduceScatter => reduced(mine),
        Collective::Reduce { root } if root == rank => reduced(0..len),
        Collective::AllGather => gathered(),
        Collective::Gather { root } if root == rank => gathered(),
        Collective::Broadcast { root } => copied(0..len, root),
        Collective::Scatter { root } => copied(mine, root),
        Collective::AllToAll => (0..cards)
            .flat_map(|owner| mine.clone().enumerate().map(move |(i, e)| (owner, i, e)))
            .filter(|&(owner, i, e)| data[owner * mine.len() + i] != T::input(op, cards, owner, e))
            .count(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_element_is_counted() {
        let case = Case {
            collective: Collective::AllReduce,
            op: ReduceOp::Sum,
            dtype: spanker_scheduler::DType::F32,
            ranks: 3,
            budget: std::time::Duration::ZERO,
        };
        let all_reduce = |data: &[f32]| count_wrong(&case, data.len(), 0, data);
        let mut data: Vec<f32> =
            (0..10).map(|i| float_reduction(ReduceOp::Sum, 3, i) as f32).collect();
        assert_eq!(all_reduce(&data), 0);
        data[4] += 1.0;
        data[9] = f32::NAN;
        assert_eq!(all_reduce(&data), 2);
    }

    #[test]
    fn contributions_differ_between_cards_and_elements() {
        let values =
            |card| (0..64).map(|i| i32::input(ReduceOp::Sum, 2, card, i)).collect::<Vec<_>>();
        assert_ne!(values(0), values(1));
        assert!(values(0).windows(2).any(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn drawn_numbers_are_ordinary_where_they_should_be() {
        for element in 0..1000 {
            let x = f16::ordinary(scramble(3, element));
            assert!((-1.0..=1.0).contains(&f64::from(x)), "{x}");
        }
    }
}
