// SPDX-License-Identifier: Apache-2.0
//! Which instructions products are computed with. Every path gives the same bits; the fastest that the
//! processor has is chosen once.

use std::fmt;
use std::sync::OnceLock;

/// Instructions that products are computed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Path {
    /// No vector instructions by name: the definition of every result.
    Portable,
    /// Four rows of weights at a time, on 64-bit Arm.
    Neon,
    /// Eight rows of weights at a time, with fused products (FMA) where weights are numbers.
    Avx2,
    /// Sixteen rows of weights at a time, with byte products (VNNI).
    Avx512,
}

impl Path {
    /// Every path, the slowest first.
    pub const ALL: [Path; 4] = [Path::Portable, Path::Neon, Path::Avx2, Path::Avx512];

    /// Whether this processor has the instructions.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Path::Portable => true,
            #[cfg(target_arch = "aarch64")]
            Path::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("fma")
            }
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => {
                Path::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The paths that this processor has, the slowest first.
    ///
    /// ```
    /// use ggml_spanker::Path;
    /// assert_eq!(Path::available().first(), Some(&Path::Portable));
    /// assert_eq!(Path::available().last(), Some(&Path::best()));
    /// ```
    #[must_use]
    pub fn available() -> Vec<Path> {
        Path::ALL.into_iter().filter(|path| path.is_available()).collect()
    }

    /// The fastest path of this processor.
    #[must_use]
    pub fn best() -> Path {
        static BEST: OnceLock<Path> = OnceLock::new();
        *BEST.get_or_init(|| Path::available().pop().unwrap_or(Path::Portable))
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Path::Portable => "portable",
            Path::Neon => "neon",
            Path::Avx2 => "avx2",
            Path::Avx512 => "avx512",
        })
    }
}
