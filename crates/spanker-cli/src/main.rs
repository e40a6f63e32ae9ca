// SPDX-License-Identifier: Apache-2.0
//! The `spanker` command.
fn main() {}
