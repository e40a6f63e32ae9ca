// SPDX-License-Identifier: Apache-2.0
//! All tests of this crate in one program, which is linked once.

mod codec;
mod goodput;
mod protocol;
mod restart;
mod soak;
mod states;
mod totality;
