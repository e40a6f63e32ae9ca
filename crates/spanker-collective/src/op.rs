// SPDX-License-Identifier: Apache-2.0
//! Reduction operations and the element types each one is defined for.

use std::fmt;
use std::str::FromStr;

use crate::{CollectiveError, DType};

/// How the contributions of the cards become one value.
///
/// The enum grows, so a `match` in another crate needs a `_` arm:
///
/// ```compile_fail,E0004
/// use spanker_collective::ReduceOp;
/// fn name(op: ReduceOp) -> &'static str {
///     match op {
///         ReduceOp::Sum => "sum",
///         ReduceOp::Max => "max",
///         ReduceOp::Min => "min",
///         ReduceOp::Avg => "avg",
///         ReduceOp::Product => "product",
///         ReduceOp::LogSumExp => "logsumexp",
///         ReduceOp::BitwiseOr => "or",
///         ReduceOp::BitwiseAnd => "and",
///         ReduceOp::BitwiseXor => "xor",
///     }
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum. Integers wrap.
    Sum,
    /// The largest value. A NaN from any card is the result.
    Max,
    /// The smallest value. A NaN from any card is the result.
    Min,
    /// The sum divided by the number of cards. Integers wrap in the sum and the quotient is
    /// truncated, whatever the algorithm.
    Avg,
    /// The product. Integers wrap.
    Product,
    /// `ln(sum(exp(x)))` without overflow. Floats only.
    LogSumExp,
    /// Bitwise or. Integers only.
    BitwiseOr,
    /// Bitwise and. Integers only.
    BitwiseAnd,
    /// Bitwise exclusive or. Integers only.
    BitwiseXor,
}

impl ReduceOp {
    /// Every operation, in the order in which help texts list them.
    pub const ALL: [ReduceOp; 9] = [
        ReduceOp::Sum,
        ReduceOp::Product,
        ReduceOp::Max,
        ReduceOp::Min,
        ReduceOp::Avg,
        ReduceOp::LogSumExp,
        ReduceOp::BitwiseOr,
        ReduceOp::BitwiseAnd,
        ReduceOp::BitwiseXor,
    ];

    /// Whether the operation is defined for elements of `dtype`.
    ///
    /// ```
    /// use spanker_collective::{DType, ReduceOp};
    /// assert!(ReduceOp::BitwiseOr.is_defined_for(DType::U32));
    /// assert!(!ReduceOp::BitwiseOr.is_defined_for(DType::F32));
    /// ```
    #[must_use]
    pub const fn is_defined_for(self, dtype: DType) -> bool {
        match self {
            ReduceOp::LogSumExp => dtype.is_float(),
            ReduceOp::BitwiseOr | ReduceOp::BitwiseAnd | ReduceOp::BitwiseXor => !dtype.is_float(),
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Min | ReduceOp::Avg | ReduceOp::Product => {
                true
            }
        }
    }

    /// The number that descriptors for cards use. An average has none: it is a sum that is divided.
    ///
    /// ```
    /// use spanker_collective::ReduceOp;
    /// assert_eq!(ReduceOp::Avg.code(), None);
    /// assert_eq!(ReduceOp::from_code(2), Some(ReduceOp::Max));
    /// ```
    #[must_use]
    pub const fn code(self) -> Option<u16> {
        Some(match self {
            ReduceOp::Sum => 0,
            ReduceOp::Product => 1,
            ReduceOp::Max => 2,
            ReduceOp::Min => 3,
            ReduceOp::Avg => return None,
            ReduceOp::LogSumExp => 4,
            ReduceOp::BitwiseOr => 5,
            ReduceOp::BitwiseAnd => 6,
            ReduceOp::BitwiseXor => 7,
        })
    }

    /// The operation with this number.
    #[must_use]
    pub fn from_code(code: u16) -> Option<ReduceOp> {
        ReduceOp::ALL.into_iter().find(|op| op.code() == Some(code))
    }

    /// The name that flags, tables and JSON use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Product => "product",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Avg => "avg",
            ReduceOp::LogSumExp => "logsumexp",
            ReduceOp::BitwiseOr => "or",
            ReduceOp::BitwiseAnd => "and",
            ReduceOp::BitwiseXor => "xor",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = CollectiveError;

    fn from_str(text: &str) -> Result<Self, CollectiveError> {
        ReduceOp::ALL.into_iter().find(|op| op.name() == text).ok_or_else(|| {
            CollectiveError::unknown("operation", text, ReduceOp::ALL.map(ReduceOp::name))
        })
    }
}
