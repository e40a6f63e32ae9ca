// SPDX-License-Identifier: Apache-2.0
//! Values of a GGUF file's metadata, and their types.

use std::io::Read;

use super::cursor::Cursor;
use crate::ModelError;

/// The longest text that is kept.
const MAX_KEPT: u64 = 4096;
/// How deep arrays may lie in arrays.
const MAX_DEPTH: u32 = 4;

/// The type of a value of the metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ValueType {
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// 32-bit IEEE float.
    F32,
    /// A byte that is 0 or 1.
    Bool,
    /// A length and that many bytes.
    Text,
    /// A type, a length and that many values.
    Array,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// 64-bit IEEE float.
    F64,
}

impl ValueType {
    /// All types in the order of their numbers in GGUF files.
    const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::Text,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    /// The fewest bytes that a value takes: all of it, or the lengths that it begins with.
    pub(super) const fn least_bytes(self) -> u64 {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 | ValueType::Text => 8,
            ValueType::Array => 12,
        }
    }

    /// Reads the number of a type.
    pub(super) fn read<R: Read>(cursor: &mut Cursor<R>) -> Result<ValueType, ModelError> {
        let at = cursor.at();
        let id = cursor.u32("a value's type")?;
        let known = ValueType::ALL.get(id as usize).copied();
        known.ok_or_else(|| ModelError::gguf(at, format!("value type {id} is not 0 to 12")))
    }
}

/// A value of the metadata. Small ones are kept, of large ones the size.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// An unsigned integer of any width.
    Unsigned(u64),
    /// A signed integer of any width.
    Signed(i64),
    /// A float of any width.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// A text of at most 4096 bytes; what is not UTF-8 in it is replaced.
    Text(String),
    /// A longer text, which is not kept; [`Header::text`](super::Header::text) reads it.
    LongText {
        /// Where it begins, from the beginning of the file.
        at: u64,
        /// Its length.
        bytes: u64,
    },
    /// An array, which is not kept; [`Header::texts`](super::Header::texts) and its like read it.
    Array {
        /// Where its first element begins, from the beginning of the file.
        at: u64,
        /// The type of its elements.
        element: ValueType,
        /// How many there are.
        len: u64,
    },
}

impl Value {
    /// The value as a number, if it is an integer that is not negative.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::Unsigned(value) => Some(value),
            Value::Signed(value) => value.try_into().ok(),
            _ => None,
        }
    }

    /// The value as a number, if it is an integer or a float. Integers beyond 2^53 are rounded.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::Unsigned(value) => Some(value as f64),
            Value::Signed(value) => Some(value as f64),
            Value::Float(value) => Some(value),
            _ => None,
        }
    }

    /// The value as a flag, if it is one.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(flag) = *self { Some(flag) } else { None }
    }

    /// The value as text, if it is a text that was kept.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Value::Text(text) = self { Some(text) } else { None }
    }

    /// Reads a value of the type `kind`.
    pub(super) fn read<R: Read>(
        cursor: &mut Cursor<R>,
        kind: ValueType,
    ) -> Result<Value, ModelError> {
        let what = "a value";
        Ok(match kind {
            ValueType::U8 => Value::Unsigned(u8::from_le_bytes(cursor.bytes(what)?).into()),
            ValueType::U16 => Value::Unsigned(u16::from_le_bytes(cursor.bytes(what)?).into()),
            ValueType::U32 => Value::Unsigned(u32::from_le_bytes(cursor.bytes(what)?).into()),
            ValueType::U64 => Value::Unsigned(u64::from_le_bytes(cursor.bytes(what)?)),
            ValueType::I8 => Value::Signed(i8::from_le_bytes(cursor.bytes(what)?).into()),
            ValueType::I16 => Value::Signed(i16::from_le_bytes(cursor.bytes(what)?).into()),
            ValueType::I32 => Value::Signed(i32::from_le_bytes(cursor.bytes(what)?).into()),
            ValueType::I64 => Value::Signed(i64::from_le_bytes(cursor.bytes(what)?)),
            ValueType::F32 => Value::Float(f32::from_le_bytes(cursor.bytes(what)?).into()),
            ValueType::F64 => Value::Float(f64::from_le_bytes(cursor.bytes(what)?)),
            ValueType::Bool => Value::Bool(read_bool(cursor)?),
            ValueType::Text => {
                let bytes = cursor.u64("a text's length")?;
                if bytes <= MAX_KEPT {
                    let text = cursor.keep(bytes, "a text")?;
                    Value::Text(String::from_utf8_lossy(&text).into_owned())
                } else {
                    let at = cursor.at();
                    cursor.skip(bytes, "a text")?;
                    Value::LongText { at, bytes }
                }
            }
            ValueType::Array => skip_array(cursor, 1)?,
        })
    }
}

fn read_bool<R: Read>(cursor: &mut Cursor<R>) -> Result<bool, ModelError> {
    let at = cursor.at();
    match cursor.bytes("a flag")? {
        [0] => Ok(false),
        [1] => Ok(true),
        [other] => Err(ModelError::gguf(at, format!("a flag is {other}, not 0 or 1"))),
    }
}

/// Reads past an array that lies `depth` arrays deep; returns where it lies and what it holds.
fn skip_array<R: Read>(cursor: &mut Cursor<R>, depth: u32) -> Result<Value, ModelError> {
    if depth > MAX_DEPTH {
        let at = cursor.at();
        return Err(ModelError::gguf(at, format!("arrays lie more than {MAX_DEPTH} deep")));
    }
    let element = ValueType::read(cursor)?;
    let len = cursor.u64("an array's length")?;
    let least = len.saturating_mul(element.least_bytes());
    let at = cursor.at();
    // Below this check, the length is bounded by what the file can hold.
    cursor.check(least, "an array")?;
    match element {
        ValueType::Text => {
            for _ in 0..len {
                let bytes = cursor.u64("a text's length")?;
                cursor.skip(bytes, "a text")?;
            }
        }
        ValueType::Array => {
            for _ in 0..len {
                skip_array(cursor, depth + 1)?;
            }
        }
        _ => cursor.skip(least, "an array")?,
    }
    Ok(Value::Array { at, element, len })
}
