// SPDX-License-Identifier: Apache-2.0
//! All tests of this crate in one program, which is linked once.

mod device;
mod inproc;
mod timed;
