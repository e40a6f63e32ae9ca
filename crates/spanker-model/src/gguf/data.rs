// SPDX-License-Identifier: Apache-2.0
//! What a header only points to, from the bytes of the whole file: arrays, long texts, weights.
//!
//! The bytes need not be those of the file that the header came from: a file can change after its
//! header was read. So every length is checked again.

use std::ops::Range;

use super::{Header, Tensor, Value, ValueType};
use crate::ModelError;

impl Header {
    /// The number at `key`, if there is one.
    #[must_use]
    pub fn number(&self, key: &str) -> Option<f64> {
        self.metadata.get(key)?.as_f64()
    }

    /// The flag at `key`, if there is one.
    #[must_use]
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.metadata.get(key)?.as_bool()
    }

    /// The text at `key`, short or long; what is not UTF-8 in it is replaced.
    ///
    /// # Errors
    ///
    /// A key that is missing or is no text, or bytes that end before it does.
    pub fn text(&self, bytes: &[u8], key: &str) -> Result<String, ModelError> {
        match self.value(key)? {
            Value::Text(text) => Ok(text.clone()),
            Value::LongText { at, bytes: len } => {
                let mut rest = Rest::new(bytes, *at, key)?;
                Ok(String::from_utf8_lossy(rest.take(*len)?).into_owned())
            }
            _ => Err(ModelError::metadata(key, "not a text")),
        }
    }

    /// The texts of the array at `key`, as their bytes.
    ///
    /// ```
    /// use spanker_model::gguf::{Field, Header, Writer};
    ///
    /// let mut writer = Writer::new();
    /// writer.put("tokenizer.ggml.tokens", Field::Texts(&["a", "bc"]))?;
    /// let mut file = Vec::new();
    /// writer.write(&mut file, |_, _| Ok(())).expect("memory");
    ///
    /// let header = Header::read(&file[..], file.len() as u64)?;
    /// assert_eq!(header.texts(&file, "tokenizer.ggml.tokens")?, [b"a", &b"bc"[..]]);
    /// let error = header.floats(&file, "tokenizer.ggml.scores").unwrap_err();
    /// assert_eq!(error.to_string(), "gguf: metadata 'tokenizer.ggml.scores': missing");
    /// # Ok::<(), spanker_model::ModelError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A key that is missing or is no array of texts, or bytes that end before it does.
    pub fn texts<'a>(&self, bytes: &'a [u8], key: &str) -> Result<Vec<&'a [u8]>, ModelError> {
        let (mut rest, element, len) = self.array(bytes, key)?;
        if element != ValueType::Text {
            return Err(ModelError::metadata(
                key,
                format!("an array of {element:?}, not of texts"),
            ));
        }
        (0..len)
            .map(|_| {
                let bytes = u64::from_le_bytes(rest.bytes()?);
                rest.take(bytes)
            })
            .collect()
    }

    /// The floats of the array at `key`, of any width.
    ///
    /// # Errors
    ///
    /// A key that is missing or is no array of floats, or bytes that end before it does.
    pub fn floats(&self, bytes: &[u8], key: &str) -> Result<Vec<f64>, ModelError> {
        let (mut rest, element, len) = self.array(bytes, key)?;
        (0..len)
            .map(|_| match element {
                ValueType::F32 => Ok(f32::from_le_bytes(rest.bytes()?).into()),
                ValueType::F64 => Ok(f64::from_le_bytes(rest.bytes()?)),
                _ => {
                    let reason = format!("an array of {element:?}, not of floats");
                    Err(ModelError::metadata(key, reason))
                }
            })
            .collect()
    }

    /// The integers of the array at `key`, of any width; flags are 0 and 1.
    ///
    /// # Errors
    ///
    /// A key that is missing or is no array of integers, an integer of 2^63 or more, or bytes that
    /// end before the array does.
    pub fn integers(&self, bytes: &[u8], key: &str) -> Result<Vec<i64>, ModelError> {
        let (mut rest, element, len) = self.array(bytes, key)?;
        (0..len)
            .map(|_| {
                Ok(match element {
                    ValueType::U8 | ValueType::Bool => u8::from_le_bytes(rest.bytes()?).into(),
                    ValueType::I8 => i8::from_le_bytes(rest.bytes()?).into(),
                    ValueType::U16 => u16::from_le_bytes(rest.bytes()?).into(),
                    ValueType::I16 => i16::from_le_bytes(rest.bytes()?).into(),
                    ValueType::U32 => u32::from_le_bytes(rest.bytes()?).into(),
                    ValueType::I32 => i32::from_le_bytes(rest.bytes()?).into(),
                    ValueType::I64 => i64::from_le_bytes(rest.bytes()?),
                    ValueType::U64 => {
                        let value = u64::from_le_bytes(rest.bytes()?);
                        i64::try_from(value).map_err(|_| {
                            ModelError::metadata(key, format!("{value} is more than 2^63 - 1"))
                        })?
                    }
                    _ => {
                        let reason = format!("an array of {element:?}, not of integers");
                        return Err(ModelError::metadata(key, reason));
                    }
                })
            })
            .collect()
    }

    /// The bytes of the file that hold `tensor`, one of this header's. They lie within the file.
    #[must_use]
    pub fn range(&self, tensor: &Tensor) -> Range<u64> {
        // The reader has checked the sums for every tensor of the file.
        let start = self.data_offset.saturating_add(tensor.offset);
        start..start.saturating_add(tensor.bytes)
    }

    /// The weights of the tensor `name` as they are stored.
    ///
    /// # Errors
    ///
    /// A tensor that is missing, or bytes that end before it does.
    pub fn weights<'a>(&self, bytes: &'a [u8], name: &str) -> Result<&'a [u8], ModelError> {
        let range = self.range(self.tensor(name)?);
        let ends = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        bytes.get(ends(range.start)..ends(range.end)).ok_or_else(|| {
            let reason = format!("it ends at byte {}, the file at {}", range.end, bytes.len());
            ModelError::tensor(name, reason)
        })
    }

    fn value(&self, key: &str) -> Result<&Value, ModelError> {
        self.metadata.get(key).ok_or_else(|| ModelError::metadata(key, "missing"))
    }

    /// What follows the length of the array at `key`, the type of its elements, and how many.
    fn array<'a, 'k>(
        &self,
        bytes: &'a [u8],
        key: &'k str,
    ) -> Result<(Rest<'a, 'k>, ValueType, u64), ModelError> {
        let Value::Array { at, element, len } = *self.value(key)? else {
            return Err(ModelError::metadata(key, "not an array"));
        };
        let rest = Rest::new(bytes, at, key)?;
        // What is collected from it is bounded by what the bytes can hold.
        if len.saturating_mul(element.least_bytes()) > rest.bytes.len() as u64 {
            return Err(rest.ends());
        }
        Ok((rest, element, len))
    }
}

/// What is left of the bytes, and the key that is read from them.
struct Rest<'a, 'k> {
    bytes: &'a [u8],
    key: &'k str,
}

impl<'a, 'k> Rest<'a, 'k> {
    fn new(bytes: &'a [u8], at: u64, key: &'k str) -> Result<Self, ModelError> {
        let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..));
        let rest = rest.map(|bytes| Rest { bytes, key });
        rest.ok_or_else(|| Rest { bytes: &[], key }.ends())
    }

    fn ends(&self) -> ModelError {
        ModelError::metadata(self.key, "the file ends in it")
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], ModelError> {
        let split = usize::try_from(len).ok().and_then(|len| self.bytes.split_at_checked(len));
        let (taken, rest) = split.ok_or_else(|| self.ends())?;
        self.bytes = rest;
        Ok(taken)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], ModelError> {
        let (taken, rest) = self.bytes.split_first_chunk().ok_or_else(|| self.ends())?;
        self.bytes = rest;
        Ok(*taken)
    }
}
