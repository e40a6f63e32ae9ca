// SPDX-License-Identifier: Apache-2.0
//! The suite that every fabric passes.

use spanker_fabric::conformance;

use crate::support::group;

#[test]
fn ranks_that_are_threads_conform_over_loopback() {
    conformance::check(group);
}
