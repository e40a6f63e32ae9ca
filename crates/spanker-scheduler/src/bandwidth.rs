// SPDX-License-Identifier: Apache-2.0
//! The three tiers of bandwidth of the reference card, fastest first.
//!
//! ```
//! use spanker_scheduler::bandwidth::{
//!     HOST_LINK_BW_BYTES_PER_SEC, INTERCARD_BW_BYTES_PER_SEC, LOCAL_DDR_BW_BYTES_PER_SEC,
//! };
//! // Moving a gigabyte takes half a second in a card, two between cards, ten from the host.
//! let seconds = |rate: u64| 1_000_000_000 as f64 / rate as f64;
//! assert_eq!(seconds(LOCAL_DDR_BW_BYTES_PER_SEC), 0.5);
//! assert_eq!(seconds(INTERCARD_BW_BYTES_PER_SEC), 2.0);
//! assert_eq!(seconds(HOST_LINK_BW_BYTES_PER_SEC), 10.0);
//! ```

pub use spanker_topology::{
    HOST_LINK_BW_BYTES_PER_SEC, INTERCARD_BW_BYTES_PER_SEC, LOCAL_DDR_BW_BYTES_PER_SEC,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_ordered_and_local_memory_is_at_least_four_links_wide() {
        const { assert!(HOST_LINK_BW_BYTES_PER_SEC > 0) };
        const { assert!(HOST_LINK_BW_BYTES_PER_SEC < INTERCARD_BW_BYTES_PER_SEC) };
        const { assert!(INTERCARD_BW_BYTES_PER_SEC < LOCAL_DDR_BW_BYTES_PER_SEC) };
        const { assert!(LOCAL_DDR_BW_BYTES_PER_SEC >= 4 * INTERCARD_BW_BYTES_PER_SEC) };
        assert_eq!(LOCAL_DDR_BW_BYTES_PER_SEC, 2_000_000_000);
        assert_eq!(INTERCARD_BW_BYTES_PER_SEC, 500_000_000);
        assert_eq!(HOST_LINK_BW_BYTES_PER_SEC, 100_000_000);
    }
}
