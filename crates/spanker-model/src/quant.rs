// SPDX-License-Identifier: Apache-2.0
//! How weights are stored: the types of GGML and two plain ones, by name and size.
//!
//! What the bits of a block mean is elsewhere (`ggml-spanker`).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ModelError;

/// The type in which weights are stored.
///
/// Weights are stored in blocks: [`block`](Quant::block) weights share
/// [`block_bytes`](Quant::block_bytes) bytes. These are the types that GGML defines and, for
/// models that no GGUF file holds, [`F8`](Quant::F8) and [`I4`](Quant::I4). As text and in JSON a
/// type is its GGML name in lower case; parsing also takes other spellings.
///
/// ```
/// use spanker_model::Quant;
/// assert_eq!(Quant::Q4_0.row_bytes(4096), 4096 / 32 * 18);
/// assert_eq!("Q4_K".parse::<Quant>()?, Quant::Q4K);
/// assert_eq!("bfloat16".parse::<Quant>()?.to_string(), "bf16");
/// # Ok::<(), spanker_model::ModelError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "&'static str")]
#[non_exhaustive]
pub enum Quant {
    /// 32-bit IEEE float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// 16-bit brain float.
    Bf16,
    /// 64-bit IEEE float.
    F64,
    /// 8-bit float, without blocks; not a type of GGML.
    F8,
    /// Signed 8-bit integer.
    I8,
    /// Signed 16-bit integer.
    I16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// 4-bit integers, two in a byte; not a type of GGML.
    I4,
    /// 1 bit, a scale for 128 weights.
    Q1_0,
    /// 2 bits, a scale for 64 weights.
    Q2_0,
    /// 4 bits, a scale for 32 weights.
    Q4_0,
    /// 4 bits, a scale and a minimum for 32 weights.
    Q4_1,
    /// 5 bits, a scale for 32 weights.
    Q5_0,
    /// 5 bits, a scale and a minimum for 32 weights.
    Q5_1,
    /// 8 bits, a scale for 32 weights.
    Q8_0,
    /// 8 bits, a scale and a sum for 32 weights; what activations become.
    Q8_1,
    /// 2 bits in super-blocks of 256 weights.
    Q2K,
    /// 3 bits in super-blocks of 256 weights.
    Q3K,
    /// 4 bits in super-blocks of 256 weights.
    Q4K,
    /// 5 bits in super-blocks of 256 weights.
    Q5K,
    /// 6 bits in super-blocks of 256 weights.
    Q6K,
    /// 8 bits in super-blocks of 256 weights; what activations become.
    Q8K,
    /// 1.56 bits per weight, from a codebook.
    Iq1S,
    /// 1.75 bits per weight, from a codebook.
    Iq1M,
    /// 2.06 bits per weight, from a codebook.
    Iq2Xxs,
    /// 2.31 bits per weight, from a codebook.
    Iq2Xs,
    /// 2.56 bits per weight, from a codebook.
    Iq2S,
    /// 3.06 bits per weight, from a codebook.
    Iq3Xxs,
    /// 3.44 bits per weight, from a codebook.
    Iq3S,
    /// 4 bits on a curve, a scale for 32 weights.
    Iq4Nl,
    /// 4 bits on a curve, in super-blocks of 256 weights.
    Iq4Xs,
    /// Ternary, 1.69 bits per weight.
    Tq1_0,
    /// Ternary, 2.06 bits per weight.
    Tq2_0,
    /// 4-bit float, a power of two for 32 weights.
    Mxfp4,
    /// 4-bit float, an 8-bit float for each 16 of 64 weights.
    Nvfp4,
}

/// One line of [`TABLE`]: type, name, weights per block, bytes per block, number in GGML.
type Line = (Quant, &'static str, u64, u64, Option<u32>);

/// What is known of each type, in the order of the enum.
const TABLE: [Line; 37] = [
    (Quant::F32, "f32", 1, 4, Some(0)),
    (Quant::F16, "f16", 1, 2, Some(1)),
    (Quant::Bf16, "bf16", 1, 2, Some(30)),
    (Quant::F64, "f64", 1, 8, Some(28)),
    (Quant::F8, "f8", 1, 1, None),
    (Quant::I8, "i8", 1, 1, Some(24)),
    (Quant::I16, "i16", 1, 2, Some(25)),
    (Quant::I32, "i32", 1, 4, Some(26)),
    (Quant::I64, "i64", 1, 8, Some(27)),
    (Quant::I4, "i4", 2, 1, None),
    (Quant::Q1_0, "q1_0", 128, 18, Some(41)),
    (Quant::Q2_0, "q2_0", 64, 18, Some(42)),
    (Quant::Q4_0, "q4_0", 32, 18, Some(2)),
    (Quant::Q4_1, "q4_1", 32, 20, Some(3)),
    (Quant::Q5_0, "q5_0", 32, 22, Some(6)),
    (Quant::Q5_1, "q5_1", 32, 24, Some(7)),
    (Quant::Q8_0, "q8_0", 32, 34, Some(8)),
    (Quant::Q8_1, "q8_1", 32, 36, Some(9)),
    (Quant::Q2K, "q2_k", 256, 84, Some(10)),
    (Quant::Q3K, "q3_k", 256, 110, Some(11)),
    (Quant::Q4K, "q4_k", 256, 144, Some(12)),
    (Quant::Q5K, "q5_k", 256, 176, Some(13)),
    (Quant::Q6K, "q6_k", 256, 210, Some(14)),
    (Quant::Q8K, "q8_k", 256, 292, Some(15)),
    (Quant::Iq1S, "iq1_s", 256, 50, Some(19)),
    (Quant::Iq1M, "iq1_m", 256, 56, Some(29)),
    (Quant::Iq2Xxs, "iq2_xxs", 256, 66, Some(16)),
    (Quant::Iq2Xs, "iq2_xs", 256, 74, Some(17)),
    (Quant::Iq2S, "iq2_s", 256, 82, Some(22)),
    (Quant::Iq3Xxs, "iq3_xxs", 256, 98, Some(18)),
    (Quant::Iq3S, "iq3_s", 256, 110, Some(21)),
    (Quant::Iq4Nl, "iq4_nl", 32, 18, Some(20)),
    (Quant::Iq4Xs, "iq4_xs", 256, 136, Some(23)),
    (Quant::Tq1_0, "tq1_0", 256, 54, Some(34)),
    (Quant::Tq2_0, "tq2_0", 256, 66, Some(35)),
    (Quant::Mxfp4, "mxfp4", 32, 17, Some(39)),
    (Quant::Nvfp4, "nvfp4", 64, 36, Some(40)),
];

/// What others call these types, without underscores and hyphens.
const ALIASES: [(&str, Quant); 25] = [
    ("fp32", Quant::F32),
    ("float32", Quant::F32),
    ("float", Quant::F32),
    ("fp16", Quant::F16),
    ("float16", Quant::F16),
    ("half", Quant::F16),
    ("bfloat16", Quant::Bf16),
    ("fp64", Quant::F64),
    ("float64", Quant::F64),
    ("double", Quant::F64),
    ("fp8", Quant::F8),
    ("float8", Quant::F8),
    ("f8e4m3", Quant::F8),
    ("f8e5m2", Quant::F8),
    ("fp8e4m3", Quant::F8),
    ("fp8e5m2", Quant::F8),
    ("float8e4m3fn", Quant::F8),
    ("float8e5m2", Quant::F8),
    ("int8", Quant::I8),
    ("w8", Quant::I8),
    ("int16", Quant::I16),
    ("int32", Quant::I32),
    ("int64", Quant::I64),
    ("int4", Quant::I4),
    ("w4", Quant::I4),
];

/// The names that an error lists.
const COMMON: [&str; 12] =
    ["f32", "f16", "bf16", "f8", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "q4_1", "i8", "i4"];

impl Quant {
    /// Every type.
    pub const ALL: [Quant; TABLE.len()] = {
        let mut all = [Quant::F32; TABLE.len()];
        let mut at = 0;
        while at < TABLE.len() {
            all[at] = TABLE[at].0;
            at += 1;
        }
        all
    };

    const fn line(self) -> &'static Line {
        &TABLE[self as usize]
    }

    /// The name that flags, tables and JSON use: GGML's, in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.line().1
    }

    /// Weights in a block.
    #[must_use]
    pub const fn block(self) -> u64 {
        self.line().2
    }

    /// The type in which activations meet weights of this type: [`Quant::Q8_0`] for blocks of 32,
    /// [`Quant::Q8K`] for blocks of 256, [`Quant::F32`] for plain numbers.
    #[must_use]
    pub const fn input(self) -> Quant {
        match self.block() {
            1 => Quant::F32,
            256 => Quant::Q8K,
            _ => Quant::Q8_0,
        }
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(self) -> u64 {
        self.line().3
    }

    /// Bytes that one weight takes, its share of the block's scales included.
    #[must_use]
    pub fn bytes_per_weight(self) -> f64 {
        self.block_bytes() as f64 / self.block() as f64
    }

    /// Bytes of a row of `cols` weights; a block that is begun counts whole. The result saturates.
    #[must_use]
    pub const fn row_bytes(self, cols: u64) -> u64 {
        cols.div_ceil(self.block()).saturating_mul(self.block_bytes())
    }

    /// The type that GGUF files call `id`; `None` where GGML defines none, or does no longer.
    #[must_use]
    pub fn from_ggml_id(id: u32) -> Option<Quant> {
        TABLE.iter().find(|line| line.4 == Some(id)).map(|line| line.0)
    }

    /// The number of this type in GGUF files; `None` for those that are not GGML's.
    #[must_use]
    pub const fn ggml_id(self) -> Option<u32> {
        self.line().4
    }

    /// The type that stores rows of `cols` weights when this one is asked for.
    ///
    /// That is this type where `cols` is a multiple of its block. Elsewhere it is what llama.cpp
    /// takes: a type with blocks of 32 (`q2_k`, `q3_k`, `q2_0` and the ternary types become `q4_0`,
    /// `q4_k` becomes `q5_0`, `q5_k` `q5_1`, `q6_k` `q8_0`, the codebooks and `iq4_xs` `iq4_nl`),
    /// and `f16` where that does not divide the row either or llama.cpp has no rule.
    ///
    /// ```
    /// use spanker_model::Quant;
    /// assert_eq!(Quant::Q4K.for_row(4096), Quant::Q4K);
    /// assert_eq!(Quant::Q4K.for_row(576), Quant::Q5_0);
    /// assert_eq!(Quant::Q4K.for_row(100), Quant::F16);
    /// ```
    #[must_use]
    pub const fn for_row(self, cols: u64) -> Quant {
        if cols.is_multiple_of(self.block()) {
            return self;
        }
        let other = match self {
            Quant::Q2_0 | Quant::Q2K | Quant::Q3K | Quant::Tq1_0 | Quant::Tq2_0 => Quant::Q4_0,
            Quant::Q4K => Quant::Q5_0,
            Quant::Q5K => Quant::Q5_1,
            Quant::Q6K => Quant::Q8_0,
            Quant::Iq1S
            | Quant::Iq1M
            | Quant::Iq2Xxs
            | Quant::Iq2Xs
            | Quant::Iq2S
            | Quant::Iq3Xxs
            | Quant::Iq3S
            | Quant::Iq4Xs => Quant::Iq4Nl,
            _ => Quant::F16,
        };
        if cols.is_multiple_of(other.block()) { other } else { Quant::F16 }
    }
}

impl fmt::Display for Quant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Quant {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        let squeeze = |name: &str| -> String {
            name.trim().chars().filter(|c| !['_', '-'].contains(c)).collect()
        };
        let key = squeeze(text).to_ascii_lowercase();
        let named = TABLE.iter().find(|line| squeeze(line.1) == key).map(|line| line.0);
        let alias = || ALIASES.iter().find(|(name, _)| *name == key).map(|(_, quant)| *quant);
        named.or_else(alias).ok_or_else(|| ModelError::unknown("weight type", text, &COMMON))
    }
}

impl TryFrom<String> for Quant {
    type Error = ModelError;

    fn try_from(text: String) -> Result<Self, ModelError> {
        text.parse()
    }
}

impl From<Quant> for &'static str {
    fn from(quant: Quant) -> Self {
        quant.name()
    }
}

#[cfg(test)]
mod tests {
    use super::{ALIASES, COMMON, Quant, TABLE};

    #[test]
    fn table_is_in_the_order_of_the_enum_and_numbers_are_unique() {
        for (at, line) in TABLE.iter().enumerate() {
            assert_eq!(line.0 as usize, at, "{}", line.1);
            assert_eq!(TABLE.iter().filter(|other| other.1 == line.1).count(), 1, "{}", line.1);
            if let Some(id) = line.4 {
                assert_eq!(Quant::from_ggml_id(id), Some(line.0));
            }
        }
    }

    #[test]
    fn every_number_of_ggml_is_known_except_those_that_it_removed() {
        let unknown: Vec<u32> = (0..43).filter(|id| Quant::from_ggml_id(*id).is_none()).collect();
        assert_eq!(unknown, [4, 5, 31, 32, 33, 36, 37, 38]);
        assert_eq!(Quant::from_ggml_id(43), None);
        assert_eq!(Quant::from_ggml_id(u32::MAX), None);
    }

    #[test]
    fn names_parse_in_any_spelling() {
        for quant in Quant::ALL {
            assert_eq!(quant.name().parse(), Ok(quant));
            assert_eq!(quant.name().to_uppercase().parse(), Ok(quant));
            assert_eq!(quant.name().replace('_', "").parse(), Ok(quant));
            assert_eq!(format!(" {}", quant.name().replace('_', "-")).parse(), Ok(quant));
        }
        for (name, quant) in ALIASES {
            assert_eq!(name.parse(), Ok(quant), "{name}");
        }
        for (name, quant) in [
            ("F8_E4M3", Quant::F8),
            ("FP16", Quant::F16),
            ("int4", Quant::I4),
            ("q40", Quant::Q4_0),
            ("Q4k", Quant::Q4K),
        ] {
            assert_eq!(name.parse(), Ok(quant), "{name}");
        }
        for name in COMMON {
            assert_eq!(name.parse::<Quant>().expect(name).name(), name);
        }
    }

    #[test]
    fn unknown_name_lists_the_common_ones() {
        let error = "q9_z".parse::<Quant>().expect_err("no such type").to_string();
        assert_eq!(
            error,
            "unknown weight type 'q9_z' (expected one of: f32, f16, bf16, f8, q8_0, q6_k, q5_k, \
             q4_k, q4_0, q4_1, i8, i4)"
        );
    }

    #[test]
    fn rows_are_whole_blocks_and_never_overflow() {
        assert_eq!(Quant::Q4_0.row_bytes(32), 18);
        assert_eq!(Quant::Q4_0.row_bytes(33), 36);
        assert_eq!(Quant::I4.row_bytes(3), 2);
        assert_eq!(Quant::F32.row_bytes(0), 0);
        assert_eq!(Quant::F64.row_bytes(u64::MAX), u64::MAX);
        for quant in Quant::ALL {
            let bits = quant.bytes_per_weight() * 8.0;
            assert!((1.0..=64.0).contains(&bits), "{quant}: {bits}");
            // A type that stands in for another always divides the row.
            for cols in [1, 31, 32, 64, 576, 960, 4096] {
                assert_eq!(cols % quant.for_row(cols).block(), 0, "{quant} {cols}");
            }
        }
    }

    #[test]
    fn json_is_the_name() {
        for quant in Quant::ALL {
            let text = serde_json::to_string(&quant).expect("a string");
            assert_eq!(text, format!("\"{}\"", quant.name()));
            assert_eq!(serde_json::from_str::<Quant>(&text).expect("a type"), quant);
        }
        assert!(serde_json::from_str::<Quant>("\"q3\"").is_err());
    }
}
