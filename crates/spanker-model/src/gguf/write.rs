// SPDX-License-Identifier: Apache-2.0
//! A GGUF file from metadata and tensors. The weights are streamed and never kept.

use std::collections::BTreeSet;
use std::io::{self, Write};

use super::Tensor;
use crate::{ModelError, Quant};

/// The number of which the data's beginning and every tensor's offset are multiples.
const ALIGNMENT: u64 = 32;
/// The version of the format that is written.
const VERSION: u32 = 3;
/// The longest name of a tensor that every reader takes.
const MAX_NAME: usize = 63;
/// The most dimensions, by the format's definition.
const MAX_DIMS: usize = 4;

/// A value for the metadata.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Field<'a> {
    /// An unsigned 32-bit integer, which most sizes are.
    U32(u32),
    /// An unsigned 64-bit integer.
    U64(u64),
    /// A signed 32-bit integer.
    I32(i32),
    /// A 32-bit float.
    F32(f32),
    /// A flag.
    Bool(bool),
    /// A text.
    Text(&'a str),
    /// An array of texts.
    Texts(&'a [&'a str]),
    /// An array of 32-bit floats.
    F32s(&'a [f32]),
    /// An array of signed 32-bit integers.
    I32s(&'a [i32]),
    /// A value of another file as it is, from [`Header::fields`](super::Header::fields).
    Stored(Stored<'a>),
}

/// A value as a file has it: its type's number, and what follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored<'a>(pub(super) &'a [u8]);

impl Field<'_> {
    /// Appends the type and the value.
    fn append(&self, out: &mut Vec<u8>) {
        match *self {
            Field::U32(value) => out.extend(typed(4, &value.to_le_bytes())),
            Field::I32(value) => out.extend(typed(5, &value.to_le_bytes())),
            Field::F32(value) => out.extend(typed(6, &value.to_le_bytes())),
            Field::Bool(value) => out.extend(typed(7, &[value.into()])),
            Field::Text(text) => {
                out.extend(8_u32.to_le_bytes());
                counted(out, text);
            }
            Field::U64(value) => out.extend(typed(10, &value.to_le_bytes())),
            Field::Stored(Stored(bytes)) => out.extend(bytes),
            Field::Texts(texts) => {
                array(out, 8, texts.len());
                texts.iter().for_each(|text| counted(out, text));
            }
            Field::F32s(values) => {
                array(out, 6, values.len());
                values.iter().for_each(|value| out.extend(value.to_le_bytes()));
            }
            Field::I32s(values) => {
                array(out, 5, values.len());
                values.iter().for_each(|value| out.extend(value.to_le_bytes()));
            }
        }
    }
}

fn typed(kind: u32, value: &[u8]) -> impl Iterator<Item = u8> {
    kind.to_le_bytes().into_iter().chain(value.iter().copied())
}

fn array(out: &mut Vec<u8>, element: u32, len: usize) {
    out.extend(9_u32.to_le_bytes());
    out.extend(element.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

fn counted(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A GGUF file that is about to be written: first all metadata and the sizes of all tensors, then
/// their weights, one after the other.
///
/// ```
/// use spanker_model::Quant;
/// use spanker_model::gguf::{Field, Header, Writer};
///
/// let mut writer = Writer::new();
/// writer.put("general.name", Field::Text("two numbers"))?;
/// writer.tensor("numbers", &[2], Quant::F32)?;
/// let mut file = Vec::new();
/// writer
///     .write(&mut file, |_, out| {
///         [1.5_f32, -2.0].iter().try_for_each(|number| out.write_all(&number.to_le_bytes()))
///     })
///     .expect("memory");
///
/// let header = Header::read(&file[..], file.len() as u64)?;
/// assert_eq!(header.weights(&file, "numbers")?[..4], 1.5_f32.to_le_bytes());
/// # Ok::<(), spanker_model::ModelError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Writer {
    names: BTreeSet<String>,
    keys: u64,
    metadata: Vec<u8>,
    tensors: Vec<(String, Tensor)>,
    /// The end of the last tensor, from the beginning of the data.
    end: u64,
}

impl Writer {
    /// A file without metadata and tensors.
    #[must_use]
    pub fn new() -> Writer {
        Writer::default()
    }

    /// Adds a key to the metadata.
    ///
    /// # Errors
    ///
    /// A key that is empty, longer than 65535 bytes or there already, or the alignment, which is the
    /// writer's own.
    pub fn put(&mut self, key: &str, value: Field<'_>) -> Result<(), ModelError> {
        if key.is_empty() || key.len() >= 1 << 16 {
            return Err(ModelError::metadata(key, "a key has 1 to 65535 bytes"));
        }
        if key == "general.alignment" {
            return Err(ModelError::metadata(key, format!("it is always {ALIGNMENT}")));
        }
        // Keys and tensors do not share names, so a mark keeps them apart.
        if !self.names.insert(format!("key {key}")) {
            return Err(ModelError::metadata(key, "it comes twice"));
        }
        counted(&mut self.metadata, key);
        value.append(&mut self.metadata);
        self.keys += 1;
        Ok(())
    }

    /// Adds a tensor behind the others. `dims` are innermost first: columns, then rows.
    ///
    /// # Errors
    ///
    /// A name that is empty, longer than 63 bytes or there already, dimensions that are not 1 to 4
    /// or have a 0 or overflow, or rows that are not whole blocks of `quant`.
    pub fn tensor(&mut self, name: &str, dims: &[u64], quant: Quant) -> Result<(), ModelError> {
        let wrong = |reason: String| Err(ModelError::tensor(name, reason));
        if name.is_empty() || name.len() > MAX_NAME {
            return wrong(format!("a name has 1 to {MAX_NAME} bytes"));
        }
        if quant.ggml_id().is_none() {
            return wrong(format!("{quant} is no type of GGML"));
        }
        let [cols, outer @ ..] = dims else { return wrong("it has no dimension".to_owned()) };
        if dims.len() > MAX_DIMS || dims.contains(&0) {
            return wrong(format!("{dims:?} are not 1 to {MAX_DIMS} sizes above 0"));
        }
        if !cols.is_multiple_of(quant.block()) {
            let block = quant.block();
            return wrong(format!("has rows of {cols}, not whole {quant} blocks of {block}"));
        }
        let row = (cols / quant.block()).checked_mul(quant.block_bytes());
        let bytes =
            row.and_then(|row| outer.iter().try_fold(row, |size, dim| size.checked_mul(*dim)));
        let offset = self.end.checked_next_multiple_of(ALIGNMENT);
        let end = bytes.zip(offset).and_then(|(bytes, offset)| offset.checked_add(bytes));
        let (Some(bytes), Some(offset), Some(end)) = (bytes, offset, end) else {
            return wrong(format!("has dimensions {dims:?}, whose product overflows"));
        };
        if !self.names.insert(format!("tensor {name}")) {
            return wrong("it comes twice".to_owned());
        }
        self.end = end;
        self.tensors.push((name.to_owned(), Tensor { dims: dims.to_vec(), quant, offset, bytes }));
        Ok(())
    }

    /// The tensors in the order in which their weights are written.
    #[must_use]
    pub fn tensors(&self) -> &[(String, Tensor)] {
        &self.tensors
    }

    /// The size of the whole file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        let data = self.end.saturating_add(ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        (self.header().len() as u64).saturating_add(data)
    }

    /// Everything before the weights.
    #[must_use]
    pub fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend(self.keys.to_le_bytes());
        out.extend(&self.metadata);
        for (name, tensor) in &self.tensors {
            counted(&mut out, name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            // A type without a number was refused when the tensor was added.
            out.extend(tensor.quant.ggml_id().unwrap_or(u32::MAX).to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
        out
    }

    /// Writes the file. `weights` is called once for each tensor, in order, with its place in
    /// [`Writer::tensors`], and writes exactly its bytes.
    ///
    /// # Errors
    ///
    /// What `out` or `weights` say, or weights that are not as long as the tensor is.
    pub fn write<W: Write>(
        &self,
        mut out: W,
        mut weights: impl FnMut(usize, &mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        out.write_all(&self.header())?;
        for (at, (name, tensor)) in self.tensors.iter().enumerate() {
            let mut part = Part { out: &mut out, left: tensor.bytes };
            weights(at, &mut part)?;
            if part.left > 0 {
                let reason =
                    format!("tensor '{name}' lacks {} of {} bytes", part.left, tensor.bytes);
                return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
            }
            let over = tensor.bytes.next_multiple_of(ALIGNMENT) - tensor.bytes;
            out.write_all(&[0; ALIGNMENT as usize][..over as usize])?;
        }
        out.flush()
    }
}

/// A writer of exactly so many bytes.
struct Part<'a, W> {
    out: &'a mut W,
    left: u64,
}

impl<W: Write> Write for Part<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            let reason = format!("{} bytes for the {} that a tensor lacks", bytes.len(), self.left);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        let written = self.out.write(bytes)?;
        self.left -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
