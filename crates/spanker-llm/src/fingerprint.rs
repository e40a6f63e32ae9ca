// SPDX-License-Identifier: Apache-2.0
//! A number that is the same for the same bytes, and hardly ever for others. It is no protection from malice.

/// FNV-1a of bytes.
///
/// ```
/// use spanker_llm::fingerprint;
/// assert_eq!(fingerprint([]), 0xcbf2_9ce4_8422_2325);
/// assert_ne!(fingerprint(*b"one"), fingerprint(*b"two"));
/// ```
#[must_use]
pub fn fingerprint(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
