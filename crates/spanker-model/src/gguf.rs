// SPDX-License-Identifier: Apache-2.0
//! The header of a GGUF file: metadata, and where each tensor lies; and a writer of such files.
//! Reading a header never reads weights, nor the arrays of the metadata: where they lie is kept, and
//! functions give them from the bytes of the whole file, which may be a memory map.
//!
//! A file is hostile until it is parsed: every count, length and offset is checked before it is
//! used, nothing is allocated by a number that the file gives, and what is kept in memory is
//! bounded. Errors name the byte at which the file is wrong. GGUF versions 2 and 3 are understood,
//! in little endian.

mod cursor;
mod data;
mod experts;
mod family;
mod map;
mod parts;
mod read;
mod value;
mod write;

use std::collections::BTreeMap;

use crate::Quant;

pub use map::ffn_norm;
pub use parts::{Part, PartName, Parts};
pub use value::{Value, ValueType};
pub use write::{Field, Stored, Writer};

/// One tensor of a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tensor {
    /// Sizes, innermost first: for a matrix its columns, then its rows. At most four.
    pub dims: Vec<u64>,
    /// How it is stored.
    pub quant: Quant,
    /// Where it begins, from the beginning of the data; [`Header::range`] counts from the beginning
    /// of the file.
    pub offset: u64,
    /// Its size as stored.
    pub bytes: u64,
}

/// What a GGUF file says before its weights begin.
///
/// ```
/// use spanker_model::gguf::Header;
///
/// // An empty file of version 3: no tensors, no metadata.
/// let mut file = b"GGUF\x03\0\0\0".to_vec();
/// file.extend([0; 16]);
/// let header = Header::read(&file[..], file.len() as u64)?;
/// assert_eq!((header.version(), header.data_offset()), (3, 32));
///
/// let error = Header::read(&file[..20], 20).unwrap_err();
/// assert_eq!(error.to_string(), "gguf: byte 16: the file ends at byte 20, in the metadata count");
/// # Ok::<(), spanker_model::ModelError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    version: u32,
    alignment: u64,
    data_offset: u64,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
}

impl Header {
    /// The version of the format: 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The number of which the data's beginning and every tensor's offset are multiples.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The byte of the file at which the data begins; offsets of tensors count from there.
    #[must_use]
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// The metadata by key.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// The tensors by name.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }
}
