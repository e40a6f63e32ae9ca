// SPDX-License-Identifier: Apache-2.0
//! Element types that a collective can carry.
//!
//! This names the types and their sizes. What a value of a type *does* under an operation is in
//! `spanker-reduce`.

use std::fmt;
use std::str::FromStr;

use crate::CollectiveError;

/// The type of one element of a buffer.
///
/// ```
/// use spanker_collective::DType;
/// assert_eq!(DType::Bf16.size(), 2);
/// assert_eq!("f32".parse::<DType>()?, DType::F32);
/// # Ok::<(), spanker_collective::CollectiveError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit IEEE float.
    F32,
    /// 64-bit IEEE float.
    F64,
    /// 16-bit IEEE float; folds accumulate in `f32`.
    F16,
    /// 16-bit brain float; folds accumulate in `f32`.
    Bf16,
    /// Signed 32-bit integer; arithmetic wraps.
    I32,
    /// Signed 64-bit integer; arithmetic wraps.
    I64,
    /// Unsigned 8-bit integer; arithmetic wraps.
    U8,
    /// Unsigned 32-bit integer; arithmetic wraps.
    U32,
}

impl DType {
    /// Every type, in the order in which help texts list them.
    pub const ALL: [DType; 8] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::Bf16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U32,
    ];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::Bf16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// The number that descriptors for cards use.
    ///
    /// ```
    /// use spanker_collective::DType;
    /// assert_eq!(DType::from_code(DType::Bf16.code()), Some(DType::Bf16));
    /// assert_eq!(DType::from_code(99), None);
    /// ```
    #[must_use]
    pub const fn code(self) -> u16 {
        match self {
            DType::F32 => 0,
            DType::F64 => 1,
            DType::F16 => 2,
            DType::Bf16 => 3,
            DType::I32 => 4,
            DType::I64 => 5,
            DType::U8 => 6,
            DType::U32 => 7,
        }
    }

    /// The type with this number.
    #[must_use]
    pub fn from_code(code: u16) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.code() == code)
    }

    /// Whether the type is a floating-point type.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::Bf16)
    }

    /// The name that flags, tables and JSON use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::U32 => "u32",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = CollectiveError;

    fn from_str(text: &str) -> Result<Self, CollectiveError> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == text).ok_or_else(|| {
            CollectiveError::unknown("element type", text, DType::ALL.map(DType::name))
        })
    }
}
