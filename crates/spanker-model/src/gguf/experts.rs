// SPDX-License-Identifier: Apache-2.0
//! Mixtures of experts in a header: which architectures have them, the counts, and which tensor is which matrix.

use super::{Header, Value};
use crate::error::printable;
use crate::experts::{MAX_EXPERTS, gating_of};
use crate::model::MAX_WIDTH;
use crate::{Experts, Gating, Matrix, Mixture, ModelError, Quant, SharedExpert};

/// The matrices of all experts of a layer: gate, up, down.
pub(super) const EXPERTS: [&str; 3] =
    ["ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"];
const ROUTER: &str = "ffn_gate_inp.weight";
/// The expert that every token meets: the row of its own gate, then gate, up, down.
const SHARED: [&str; 4] = [
    "ffn_gate_inp_shexp.weight",
    "ffn_gate_shexp.weight",
    "ffn_up_shexp.weight",
    "ffn_down_shexp.weight",
];

/// The biases of all experts of a layer, one row for each: of gate, up, down.
const BIASES: [&str; 3] = ["ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"];

/// Whether a tensor of a layer belongs to a mixture of experts.
pub(super) fn is_expert(rest: &str) -> bool {
    rest.contains("_exps.") || rest.contains("_shexp.") || rest.starts_with("ffn_gate_inp")
}

/// Whether a tensor of a layer has a bias for each expert.
pub(super) fn is_bias(rest: &str) -> bool {
    BIASES.contains(&rest)
}

/// Whether a tensor of a layer is a matrix of a mixture that is understood: one with an expert that every token meets, or
/// without.
pub(super) fn is_matrix(rest: &str, mixture: Mixture) -> bool {
    let shared = mixture.shared > 0 && SHARED.contains(&rest);
    rest == ROUTER || EXPERTS.contains(&rest) || shared
}

impl Header {
    /// What the model's layers are a mixture of; nothing for dense layers.
    pub(super) fn mixture(&self, architecture: &str) -> Result<Option<Mixture>, ModelError> {
        let key = |rest: &str| format!("{architecture}.{rest}");
        let said = self.metadata.get(&key("expert_count")).is_some_and(|n| n.as_u64() != Some(0));
        let tensor = self
            .tensors
            .keys()
            .find(|name| super::map::layer_of(name).is_some_and(|(_, rest)| is_expert(rest)));
        let Some(gating) = gating_of(architecture) else {
            return match (said, tensor) {
                (true, _) => {
                    let reason = format!("{architecture} has no experts that are understood");
                    Err(ModelError::metadata(&key("expert_count"), reason))
                }
                (_, Some(name)) => {
                    Err(ModelError::tensor(name, format!("{architecture} has no experts")))
                }
                _ => Ok(None),
            };
        };
        // Mixtral's files say llama.
        if architecture == "llama" && !said && tensor.is_none() {
            return Ok(None);
        }
        let required = |rest: &str, max: u64| {
            let missing = || ModelError::metadata(&key(rest), "missing");
            self.size(&key(rest), max)?.ok_or_else(missing)
        };
        let experts = required("expert_count", MAX_EXPERTS)?;
        let used = required("expert_used_count", experts)?;
        self.check_weighing(architecture, gating)?;
        let shared = match architecture {
            "qwen2moe" => self.shared_width(&key("expert_shared_feed_forward_length"))?,
            _ => 0,
        };
        Ok(Some(Mixture { experts, used, gating, shared }))
    }

    /// Refuses what would weigh or choose experts in another way than the architecture's.
    fn check_weighing(&self, architecture: &str, gating: Gating) -> Result<(), ModelError> {
        let key = |rest: &str| format!("{architecture}.{rest}");
        let normed = gating == Gating::SoftmaxNormed;
        let refused = |rest: &str, value: &Value, expected: &str| {
            let value = printable(&format!("{value:?}"));
            let reason = format!("{value}, and only {expected} is understood");
            Err(ModelError::metadata(&key(rest), reason))
        };
        let is = |value: &Value, number: u64| match value {
            Value::Float(float) => *float == number as f64,
            Value::Bool(flag) => u64::from(*flag) == number,
            value => value.as_u64() == Some(number),
        };
        let (of_all, function) = match gating {
            Gating::SoftmaxOfChosen => (3, "3 (softmax of the chosen)"),
            _ => (1, "1 (softmax)"),
        };
        for (rest, known, expected) in [
            // 0 and 1 are both "as they are".
            ("expert_weights_scale", &[0, 1][..], "1"),
            ("expert_weights_norm", &[normed as u64][..], if normed { "true" } else { "false" }),
            ("expert_gating_func", &[0, of_all][..], function),
            ("expert_group_count", &[0, 1][..], "1"),
            ("leading_dense_block_count", &[0][..], "0"),
            ("interleave_moe_layer_step", &[0, 1][..], "1"),
            ("moe_every_n_layers", &[0, 1][..], "1"),
        ] {
            if let Some(value) = self.metadata.get(&key(rest))
                && !known.iter().any(|&number| is(value, number))
            {
                return refused(rest, value, expected);
            }
        }
        Ok(())
    }

    /// The width of the shared expert: what the file says, or what its first layer has.
    fn shared_width(&self, key: &str) -> Result<u64, ModelError> {
        if let Some(width) = self.size(key, MAX_WIDTH)? {
            return Ok(width);
        }
        let name = format!("blk.0.{}", SHARED[1]);
        Ok(self.matrix(&name)?.rows)
    }

    /// The width of an expert: what the file says, or what its first layer has.
    pub(super) fn expert_width(&self, architecture: &str) -> Result<u64, ModelError> {
        for rest in ["expert_feed_forward_length", "feed_forward_length"] {
            // Other architectures say there how wide a dense layer would be.
            let own = ["llama", "olmoe", "granitemoe"].contains(&architecture)
                || rest.starts_with("expert");
            let width = match own {
                true => self.size(&format!("{architecture}.{rest}"), MAX_WIDTH)?,
                false => None,
            };
            if let Some(width) = width {
                return Ok(width);
            }
        }
        let name = format!("blk.0.{}", EXPERTS[0]);
        let count = self.tensor(&name)?.dims.get(2).copied().unwrap_or(1);
        Ok(self.stack(&name, count)?.rows)
    }

    /// The sizes of one of the matrices that lie end to end in a tensor of three dimensions.
    pub(super) fn stack(&self, name: &str, count: u64) -> Result<Matrix, ModelError> {
        let tensor = self.tensor(name)?;
        match tensor.dims[..] {
            [cols, rows, has] if has == count => Ok(Matrix { rows, cols, quant: tensor.quant }),
            [_, _, has] => {
                Err(ModelError::tensor(name, format!("{has} experts, and the model has {count}")))
            }
            _ => {
                Err(ModelError::tensor(name, format!("{:?} is no stack of matrices", tensor.dims)))
            }
        }
    }

    /// The biases of a layer's experts: whether they are there, and as long as they must be.
    pub(super) fn expert_biases(
        &self,
        at: u64,
        (mixture, ffn, hidden): (Mixture, u64, u64),
    ) -> Result<(), ModelError> {
        for (rest, width) in BIASES.into_iter().zip([ffn, ffn, hidden]) {
            let name = format!("blk.{at}.{rest}");
            let tensor = self.tensor(&name)?;
            if tensor.dims != [width, mixture.experts] || tensor.quant != Quant::F32 {
                let (dims, quant, count) = (&tensor.dims, tensor.quant, mixture.experts);
                let reason = format!("{dims:?} of {quant}, expected [{width}, {count}] of f32");
                return Err(ModelError::tensor(&name, reason));
            }
        }
        Ok(())
    }

    /// What a layer has besides one expert's matrices.
    pub(super) fn experts(&self, at: u64, mixture: Mixture) -> Result<Experts, ModelError> {
        let name = |rest: &str| format!("blk.{at}.{rest}");
        let router = self.matrix(&name(ROUTER))?;
        let shared = match mixture.shared {
            0 => None,
            _ => {
                let [router, gate, up, down] = SHARED;
                // One row, which files have as a vector.
                let row = self.tensor(&name(router))?;
                let (rows, cols, quant) = match row.dims[..] {
                    [cols] if row.quant == Quant::F32 => (1, cols, row.quant),
                    _ => {
                        let reason = format!("{:?} of {} is no vector of f32", row.dims, row.quant);
                        return Err(ModelError::tensor(&name(router), reason));
                    }
                };
                Some(SharedExpert {
                    router: Matrix { rows, cols, quant },
                    gate: self.matrix(&name(gate))?,
                    up: self.matrix(&name(up))?,
                    down: self.matrix(&name(down))?,
                })
            }
        };
        Ok(Experts { count: mixture.experts, router, shared })
    }
}
