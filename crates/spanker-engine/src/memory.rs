// SPDX-License-Identifier: Apache-2.0
//! How much memory this machine has left.

/// Bytes that can be had without a process being killed for them, where the system says so.
#[must_use]
pub fn available() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kibibytes: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    kibibytes.checked_mul(1024)
}
