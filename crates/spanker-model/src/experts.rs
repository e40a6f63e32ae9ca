// SPDX-License-Identifier: Apache-2.0
//! What a mixture of experts is: how many experts a layer has, how many of them a token meets, and how they are weighed.
//!
//! An expert is a small feed-forward network: [`Layer::gate`](crate::Layer::gate), `up` and `down` are the sizes of one.

use serde::{Deserialize, Serialize};

use crate::{Matrix, ModelError, Quant};

/// The most experts that a layer may have.
pub const MAX_EXPERTS: u64 = 1024;

/// How the logits of a layer's router become the weights of the experts that were chosen. Chosen are those with the
/// largest logits, among equals those that come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Gating {
    /// Probabilities among all experts: their sum is less than 1.
    Softmax,
    /// The same divided by the sum of those that were chosen.
    SoftmaxNormed,
    /// Probabilities among those that were chosen.
    SoftmaxOfChosen,
    /// For each its own `1 / (1 + exp(-logit))`.
    Sigmoid,
}

impl Gating {
    /// Every way, in the order of the numbers that descriptors of work have for them.
    pub const ALL: [Gating; 4] =
        [Gating::Softmax, Gating::SoftmaxNormed, Gating::SoftmaxOfChosen, Gating::Sigmoid];

    /// The number that descriptors of work have for it.
    #[must_use]
    pub fn code(self) -> u32 {
        Gating::ALL.iter().position(|&known| known == self).map_or(0, |at| at as u32)
    }

    /// The way with a number, if there is one.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Gating> {
        Gating::ALL.get(code as usize).copied()
    }
}

/// How the routers of an architecture weigh experts, by its name in GGUF files; nothing for those that have none. A model
/// of `llama` may be dense or, as Mixtral is, a mixture.
#[must_use]
pub fn gating_of(architecture: &str) -> Option<Gating> {
    Some(match architecture {
        "llama" | "qwen3moe" | "granitemoe" => Gating::SoftmaxNormed,
        "qwen2moe" | "olmoe" => Gating::Softmax,
        "gpt-oss" => Gating::SoftmaxOfChosen,
        _ => return None,
    })
}

/// What all layers of a mixture have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mixture {
    /// Experts of a layer.
    pub experts: u64,
    /// Experts that a token meets.
    pub used: u64,
    /// How they are weighed.
    pub gating: Gating,
    /// The width of the expert that every token meets besides; 0 if there is none.
    #[serde(default)]
    pub shared: u64,
}

impl Mixture {
    /// How many different experts `rows` tokens meet, if each token's are drawn at random: what they read of a layer.
    ///
    /// ```
    /// use spanker_model::{Gating, Mixture};
    /// let mixture = Mixture { experts: 128, used: 8, gating: Gating::SoftmaxNormed, shared: 0 };
    /// assert_eq!(mixture.distinct(1), 8);
    /// assert_eq!(mixture.distinct(16), 82); // of 128 picks
    /// assert_eq!(mixture.distinct(1000), 128);
    /// ```
    #[must_use]
    pub fn distinct(&self, rows: u64) -> u64 {
        distinct_experts(self.experts, self.used, rows)
    }

    pub(crate) fn check(&self, ffn: u64, max_width: u64) -> Result<(), ModelError> {
        let refused = |what: &str, size: u64, max: u64| {
            let reason = format!("{size} is not between 1 and {max}");
            Err(ModelError::inconsistent(what, reason))
        };
        if !(1..=MAX_EXPERTS).contains(&self.experts) {
            return refused("experts", self.experts, MAX_EXPERTS);
        }
        if !(1..=self.experts).contains(&self.used) {
            return refused("experts used", self.used, self.experts);
        }
        // Bounds of a dense layer's sizes hold for all experts together.
        let wide = self.experts.saturating_mul(ffn);
        if wide > max_width {
            return refused("experts x ffn", wide, max_width);
        }
        if self.shared > max_width {
            return refused("shared expert", self.shared, max_width);
        }
        Ok(())
    }
}

/// How many different ones of `experts` experts are met by `rows` tokens that each meet `used`: the expectation, if all are
/// equally likely, to the nearest whole number.
#[must_use]
pub fn distinct_experts(experts: u64, used: u64, rows: u64) -> u64 {
    if rows <= 1 || experts == 0 {
        return used.saturating_mul(rows).min(experts);
    }
    let missed = (1.0 - used.min(experts) as f64 / experts as f64).max(0.0);
    // Whole powers by squaring: the same bits on every machine, which `powf` does not promise.
    let (mut power, mut base, mut left) = (1.0, missed, rows);
    while left > 0 {
        if left % 2 == 1 {
            power *= base;
        }
        base *= base;
        left /= 2;
    }
    ((experts as f64 * (1.0 - power)).round() as u64).clamp(used.min(experts), experts)
}

/// What a layer of a mixture has besides the sizes of one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Experts {
    /// How many there are.
    pub count: u64,
    /// The router: a row of weights for each expert.
    pub router: Matrix,
    /// The expert that every token meets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedExpert>,
}

/// An expert that every token meets, and the row of weights of its own gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SharedExpert {
    /// One row: how much the expert counts.
    pub router: Matrix,
    /// Its gate.
    pub gate: Matrix,
    /// Its way up.
    pub up: Matrix,
    /// Its way down.
    pub down: Matrix,
}

impl SharedExpert {
    /// The matrices with their names.
    #[must_use]
    pub const fn matrices(&self) -> [(&'static str, &Matrix); 4] {
        [
            ("shared router", &self.router),
            ("shared gate", &self.gate),
            ("shared up", &self.up),
            ("shared down", &self.down),
        ]
    }
}

impl Experts {
    /// Experts of a layer of this width whose matrices are stored in `quant`; routers are f32, as files have them.
    pub(crate) fn new(mixture: Mixture, hidden: u64, quant: Quant) -> Experts {
        let plain = |rows: u64, cols: u64| Matrix { rows, cols, quant: Quant::F32 };
        let matrix = |rows: u64, cols: u64| plain(rows, cols).with_quant(quant);
        let shared = (mixture.shared > 0).then(|| SharedExpert {
            router: plain(1, hidden),
            gate: matrix(mixture.shared, hidden),
            up: matrix(mixture.shared, hidden),
            down: matrix(hidden, mixture.shared),
        });
        Experts { count: mixture.experts, router: plain(mixture.experts, hidden), shared }
    }

    /// The matrices that every token meets, with their names.
    pub fn always(&self) -> impl Iterator<Item = (&'static str, &Matrix)> {
        let shared = self.shared.as_ref().map(SharedExpert::matrices);
        std::iter::once(("router", &self.router)).chain(shared.into_iter().flatten())
    }

    /// The same experts with the matrices of the shared one stored in `quant`; routers stay.
    #[must_use]
    pub const fn with_quant(&self, quant: Quant) -> Experts {
        let shared = match self.shared {
            None => None,
            Some(shared) => Some(SharedExpert {
                router: shared.router,
                gate: shared.gate.with_quant(quant),
                up: shared.up.with_quant(quant),
                down: shared.down.with_quant(quant),
            }),
        };
        Experts { count: self.count, router: self.router, shared }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distinct_experts_are_what_a_draw_comes_to() {
        assert_eq!(distinct_experts(8, 2, 1), 2);
        assert_eq!(distinct_experts(8, 8, 5), 8);
        assert_eq!(distinct_experts(8, 2, 2), 4); // 8 (1 - (3/4)^2) = 3.5
        assert_eq!(distinct_experts(128, 8, 4), 29);
        assert_eq!(distinct_experts(0, 0, 9), 0);
        assert_eq!(distinct_experts(4, 9, u64::MAX), 4);
    }

    #[test]
    fn codes_name_every_gating_once() {
        for gating in Gating::ALL {
            assert_eq!(Gating::from_code(gating.code()), Some(gating));
        }
        assert_eq!(Gating::from_code(4), None);
    }
}
