// SPDX-License-Identifier: Apache-2.0
//! The three tiers of bandwidth of the reference card. None of them has been measured: no board exists.

use std::fmt;

/// Bytes per second.
///
/// ```
/// use spanker_topology::BytesPerSecond;
/// assert_eq!(BytesPerSecond(500_000_000).to_string(), "500 MB/s");
/// assert_eq!(BytesPerSecond(2_000_000_000).to_string(), "2 GB/s");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BytesPerSecond(pub u64);

impl fmt::Display for BytesPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.0 as f64;
        let (scaled, unit) = match self.0 {
            0..1_000 => (rate, "B/s"),
            1_000..1_000_000 => (rate / 1e3, "kB/s"),
            1_000_000..1_000_000_000 => (rate / 1e6, "MB/s"),
            _ => (rate / 1e9, "GB/s"),
        };
        let text = format!("{scaled:.2}");
        f.pad(&format!("{} {unit}", text.trim_end_matches('0').trim_end_matches('.')))
    }
}

/// What a card's own memory sustains: the middle of 1.5 to 2.4 GB/s, which open memory controllers
/// reach on this FPGA.
pub const LOCAL_DDR_BW_BYTES_PER_SEC: u64 = 2_000_000_000;

/// What the inter-card link carries in one direction: four lanes of 1.25 Gb/s, less the 8b/10b coding.
pub const INTERCARD_BW_BYTES_PER_SEC: u64 = 500_000_000;

/// What the Gigabit Ethernet link to the host sustains after headers.
pub const HOST_LINK_BW_BYTES_PER_SEC: u64 = 100_000_000;
