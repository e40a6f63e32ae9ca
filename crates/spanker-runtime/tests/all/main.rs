// SPDX-License-Identifier: Apache-2.0
//! All tests of this crate in one program, which is linked once.

#[path = "../support/cc.rs"]
mod cc;

mod control;
mod real_card;
mod versions;
mod work;
