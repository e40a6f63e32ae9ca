// SPDX-License-Identifier: Apache-2.0
//! The suite that every fabric passes, over connections of this machine.

mod support;

use spanker_fabric::conformance;
use support::group;

#[test]
fn ranks_that_are_threads_conform_over_loopback() {
    conformance::check(group);
}
