// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with a call. On every error no buffer has changed.

use spanker_collective::{DType, ReduceOp};

/// An error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReduceError {
    /// A buffer is not as long as the collective needs it.
    #[error("card {card}: buffer has {actual} elements, expected {expected}")]
    Length {
        /// The card, or the place of the buffer in the argument.
        card: usize,
        /// Elements that it must have.
        expected: usize,
        /// Elements that it has.
        actual: usize,
    },
    /// Inputs and outputs are not equally many.
    #[error("{outputs} output buffers for {inputs} input buffers")]
    Counts {
        /// Buffers given as input.
        inputs: usize,
        /// Buffers given as output.
        outputs: usize,
    },
    /// The operation is not defined for the element type.
    #[error("operation {op} is not defined for {dtype}")]
    Undefined {
        /// The operation.
        op: ReduceOp,
        /// The element type.
        dtype: DType,
    },
}
