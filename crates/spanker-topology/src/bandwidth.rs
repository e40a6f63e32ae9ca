// SPDX-License-Identifier: Apache-2.0
//! The three tiers of bandwidth of the reference card. None of them has been measured: no board exists.

/// What a card's own memory sustains: the middle of 1.5 to 2.4 GB/s, which open memory controllers
/// reach on this FPGA.
pub const LOCAL_DDR_BW_BYTES_PER_SEC: u64 = 2_000_000_000;

/// What the inter-card link carries in one direction: four lanes of 1.25 Gb/s, less the 8b/10b coding.
pub const INTERCARD_BW_BYTES_PER_SEC: u64 = 500_000_000;

/// What the Gigabit Ethernet link to the host sustains after headers.
pub const HOST_LINK_BW_BYTES_PER_SEC: u64 = 100_000_000;
