// SPDX-License-Identifier: Apache-2.0
//! A weight matrix and a transformer layer, as sizes.

use serde::{Deserialize, Serialize};

use crate::{Experts, Quant, Turning};

/// A weight matrix: `rows` outputs by `cols` inputs. A row is stored whole.
///
/// ```
/// use spanker_model::{Matrix, Quant};
/// let matrix = Matrix { rows: 1024, cols: 4096, quant: Quant::Q8_0 };
/// assert_eq!(matrix.row_bytes(), 128 * 34);
/// assert_eq!(matrix.bytes(), 1024 * 128 * 34);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Matrix {
    /// Outputs.
    pub rows: u64,
    /// Inputs: the length of a row.
    pub cols: u64,
    /// How its weights are stored.
    pub quant: Quant,
}

impl Matrix {
    /// Bytes of one row.
    #[must_use]
    pub const fn row_bytes(&self) -> u64 {
        self.quant.row_bytes(self.cols)
    }

    /// Bytes of the matrix. The result saturates.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.rows.saturating_mul(self.row_bytes())
    }

    /// How many weights it has. The result saturates.
    #[must_use]
    pub const fn weights(&self) -> u64 {
        self.rows.saturating_mul(self.cols)
    }

    /// The same matrix stored in `quant`, or in what [stands in](Quant::for_row) for it.
    #[must_use]
    pub const fn with_quant(&self, quant: Quant) -> Matrix {
        Matrix { rows: self.rows, cols: self.cols, quant: quant.for_row(self.cols) }
    }
}

/// One transformer layer: attention, then a gated feed-forward network, or a mixture of such.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Layer {
    /// Queries: heads x head size outputs.
    pub q: Matrix,
    /// Keys: KV heads x head size outputs.
    pub k: Matrix,
    /// Values: KV heads x head size outputs.
    pub v: Matrix,
    /// Attention's output: back to the model's width.
    pub o: Matrix,
    /// The feed-forward network's gate; of a mixture, one expert's, and so for the two that follow.
    pub gate: Matrix,
    /// The feed-forward network's way up.
    pub up: Matrix,
    /// The feed-forward network's way down: back to the model's width.
    pub down: Matrix,
    /// Bytes of norms and biases, which every card of a tensor-parallel group keeps whole.
    pub other_bytes: u64,
    /// What the layer has besides if it is a mixture of experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    /// How many positions a token sees, its own included, if not all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// Which angles turn queries and keys.
    #[serde(default, skip_serializing_if = "is_global")]
    pub turning: Turning,
}

fn is_global(turning: &Turning) -> bool {
    *turning == Turning::Global
}

impl Layer {
    /// The matrices with their names, in the order in which a token meets them.
    #[must_use]
    pub const fn matrices(&self) -> [(&'static str, &Matrix); 7] {
        [
            ("q", &self.q),
            ("k", &self.k),
            ("v", &self.v),
            ("o", &self.o),
            ("gate", &self.gate),
            ("up", &self.up),
            ("down", &self.down),
        ]
    }

    /// Bytes of the layer, norms and biases included. The result saturates.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.sum(self.expert_count(), Matrix::bytes).saturating_add(self.other_bytes)
    }

    /// Bytes that a token reads of the layer if it meets `used` experts. The result saturates.
    #[must_use]
    pub fn read_bytes(&self, used: u64) -> u64 {
        let experts = self.experts.map_or(1, |experts| used.min(experts.count));
        self.sum(experts, Matrix::bytes).saturating_add(self.other_bytes)
    }

    /// How many weights the matrices have. The result saturates.
    #[must_use]
    pub fn weights(&self) -> u64 {
        self.sum(self.expert_count(), Matrix::weights)
    }

    /// How many feed-forward networks there are: 1 without a mixture.
    #[must_use]
    pub fn expert_count(&self) -> u64 {
        self.experts.map_or(1, |experts| experts.count)
    }

    /// A number of every matrix, with so many experts.
    fn sum(&self, experts: u64, of: fn(&Matrix) -> u64) -> u64 {
        let always = self.experts.iter().flat_map(Experts::always).map(|(_, matrix)| of(matrix));
        let attention = [&self.q, &self.k, &self.v, &self.o].map(of);
        let expert = [&self.gate, &self.up, &self.down].map(|m| of(m).saturating_mul(experts));
        attention.into_iter().chain(expert).chain(always).fold(0, u64::saturating_add)
    }

    /// The same layer with all matrices stored in `quant`; norms and biases stay.
    #[must_use]
    pub const fn with_quant(&self, quant: Quant) -> Layer {
        Layer {
            q: self.q.with_quant(quant),
            k: self.k.with_quant(quant),
            v: self.v.with_quant(quant),
            o: self.o.with_quant(quant),
            gate: self.gate.with_quant(quant),
            up: self.up.with_quant(quant),
            down: self.down.with_quant(quant),
            experts: match self.experts {
                Some(experts) => Some(experts.with_quant(quant)),
                None => None,
            },
            ..*self
        }
    }
}
