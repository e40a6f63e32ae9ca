// SPDX-License-Identifier: Apache-2.0
//! Checks of the source tree itself; they are in `tests/tidy.rs`. Nothing depends on this crate.
#![forbid(unsafe_code)]
