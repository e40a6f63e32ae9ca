// SPDX-License-Identifier: Apache-2.0
//! Atomics and locks, from the standard library or from a model checker that tries every order.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};
