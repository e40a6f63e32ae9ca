// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with blocks, matrices and files of them. The bits inside a block are never an
//! error: all of them decode to something.

/// A refused operation; nothing was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The dimensions are not those of a product of Q4_K matrices, or do not fit the operands.
    #[error("bad dimensions: m = {m}, k = {k}, n = {n} with blocks of {qk}")]
    BadDims {
        /// The rows of the left operand.
        m: usize,
        /// The length of a row of either operand.
        k: usize,
        /// The rows of the right operand.
        n: usize,
        /// The block length that `k` must be a positive multiple of.
        qk: usize,
    },
    /// The output is too short for the result.
    #[error("output of {have} bytes is too small, {need} are needed")]
    OutputTooSmall {
        /// The output's size in bytes.
        have: usize,
        /// The result's size in bytes.
        need: usize,
    },
    /// Nothing is computed with this type here.
    #[error("type {quant} cannot be used here")]
    Type {
        /// The type.
        quant: spanker_model::Quant,
    },
    /// This processor has not the instructions.
    #[error("this processor has no {path} instructions")]
    Path {
        /// The instructions that were asked for.
        path: crate::Path,
    },
    /// A part of a matrix that begins or ends inside a block.
    #[error("column {column} is inside a block of {block}")]
    SplitBlock {
        /// Where the part begins or ends.
        column: usize,
        /// The block's length.
        block: usize,
    },
    /// A part that is outside its matrix.
    #[error("{what} up to {end} of {len}")]
    Outside {
        /// Rows or columns.
        what: &'static str,
        /// The end of the part.
        end: usize,
        /// How many the matrix has.
        len: usize,
    },
    /// The device that was to compute the product did not.
    #[error("{device}: {op}: {reason}")]
    Device {
        /// The device's name, such as `card 0`.
        device: String,
        /// The step that failed, such as `allocate` or `wait`.
        op: &'static str,
        /// What it did instead.
        fault: DeviceFault,
        /// The same in words, with the values.
        reason: String,
    },
    /// A file could not be opened or mapped.
    #[error("{path}: {op}: {reason}")]
    File {
        /// The file.
        path: String,
        /// What was tried.
        op: String,
        /// What the system says.
        reason: String,
    },
    /// A file that is not a sound model.
    #[error(transparent)]
    Model(#[from] spanker_model::ModelError),
    /// A value that a type cannot hold.
    #[error("value {value} at {at} cannot be stored as {quant}")]
    Value {
        /// The value.
        value: String,
        /// Its place among those that were to be encoded.
        at: usize,
        /// The type.
        quant: spanker_model::Quant,
    },
    /// A part of a model that is not a sound file.
    #[error("part '{name}'")]
    Part {
        /// The file's name.
        name: String,
        /// What is wrong with it.
        source: spanker_model::ModelError,
    },
    /// A tensor that is not within its file.
    #[error("tensor '{name}' is not within the file")]
    Range {
        /// The tensor.
        name: String,
    },
    /// The input is not a whole number of blocks.
    #[error("input of {len} bytes is not a whole number of {block}-byte blocks")]
    PartialBlock {
        /// The input's size in bytes.
        len: usize,
        /// A block's size in bytes.
        block: usize,
    },
}

/// What a device did instead of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceFault {
    /// It has not the memory for the operands and the result.
    Memory,
    /// It is gone.
    Lost,
    /// It answers nobody, or does not get on with the product.
    Stuck,
    /// It takes longer than it may.
    Slow,
    /// It answers nonsense.
    Wrong,
    /// It is at work for another program.
    Busy,
    /// Its version of the ABI has no such products.
    Unsupported,
    /// It refused for another reason.
    Refused,
}

/// The result of an operation on quantised blocks.
pub type Result<T> = std::result::Result<T, Error>;
