// SPDX-License-Identifier: Apache-2.0
//! How much memory this machine has, and has left.

/// Where the system does not say how much memory it has.
const UNKNOWN: u64 = 1_000_000_000_000;

/// Bytes that the system has, or lets this process have.
pub(crate) fn of_machine() -> u64 {
    limited(&listed(), &std::fs::read_to_string("/sys/fs/cgroup/memory.max").unwrap_or_default())
}

/// Bytes that can be had without a process being killed for them, where the system says so.
#[must_use]
pub fn available() -> Option<usize> {
    usize::try_from(entry(&listed(), "MemAvailable:")?).ok()
}

fn listed() -> String {
    std::fs::read_to_string("/proc/meminfo").unwrap_or_default()
}

fn entry(listed: &str, name: &str) -> Option<u64> {
    let line = listed.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn limited(listed: &str, limit: &str) -> u64 {
    let total = entry(listed, "MemTotal:").unwrap_or(UNKNOWN);
    limit.trim().parse().map_or(total, |limit: u64| total.min(limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_what_the_system_has_or_a_limit_below_that() {
        let listed = "MemTotal:       24000000 kB\nMemAvailable:  1 kB\n";
        assert_eq!(limited(listed, "max\n"), 24_576_000_000);
        assert_eq!(limited(listed, "1000000\n"), 1_000_000);
        assert_eq!(limited(listed, "99000000000\n"), 24_576_000_000);
        assert_eq!(limited("", ""), UNKNOWN);
        assert_eq!(entry(listed, "MemAvailable:"), Some(1024));
    }
}
