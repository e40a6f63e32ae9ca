// SPDX-License-Identifier: Apache-2.0
//! What it takes to hand tokens to clients where the threads that compute them leave no core free: the processor time of
//! all other threads of this process.

use std::time::Instant;

/// Threads that compute, by the beginnings of their names.
const COMPUTING: [&str; 3] = ["spanker-service", "spanker-team", "spanker-card"];
/// Less than this part of a core is not free.
const FREE: f64 = 0.5;

/// Processor time of a process, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spent {
    computing: f64,
    other: f64,
}

/// A look at what threads have spent so far.
#[derive(Debug)]
pub(super) struct EdgeClock {
    begun: Instant,
    before: Spent,
}

impl EdgeClock {
    /// From now on; nothing where the system does not tell.
    pub(super) fn start() -> Option<EdgeClock> {
        Some(EdgeClock { begun: Instant::now(), before: spent(&tasks()?) })
    }

    /// What each of so many tokens took of the time of threads that compute, in seconds: all that others have spent where
    /// these leave no core free, nothing where they do.
    pub(super) fn of_each(&self, tokens: usize) -> f64 {
        let Some(tasks) = tasks() else { return 0.0 };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let wall = self.begun.elapsed().as_secs_f64();
        of_each(self.before, spent(&tasks), wall, cores, tokens)
    }
}

fn of_each(before: Spent, after: Spent, wall: f64, cores: usize, tokens: usize) -> f64 {
    let free = cores as f64 - (after.computing - before.computing) / wall.max(1e-9);
    match free < FREE {
        true => (after.other - before.other).max(0.0) / tokens.max(1) as f64,
        false => 0.0,
    }
}

fn spent(tasks: &[(String, f64)]) -> Spent {
    let mut spent = Spent { computing: 0.0, other: 0.0 };
    for (name, seconds) in tasks {
        match COMPUTING.iter().any(|begin| name.starts_with(begin)) {
            true => spent.computing += seconds,
            false => spent.other += seconds,
        }
    }
    spent
}

/// Names of this process's threads, and the seconds that each has run.
fn tasks() -> Option<Vec<(String, f64)>> {
    let threads = std::fs::read_dir("/proc/self/task").ok()?;
    let one = |thread: std::fs::DirEntry| {
        // A thread may end while others are read.
        let text = |file: &str| std::fs::read_to_string(thread.path().join(file)).ok();
        let ran: f64 = text("schedstat")?.split_whitespace().next()?.parse().ok()?;
        Some((text("comm")?.trim().to_owned(), ran / 1e9))
    };
    let list: Vec<_> = threads.flatten().filter_map(one).collect();
    (!list.is_empty()).then_some(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_threads_cost_what_they_ran_where_no_core_is_free() {
        let before = spent(&[("spanker-service".into(), 1.0), ("spanker-http".into(), 0.5)]);
        let tasks = [("spanker-service", 1.95), ("spanker-team-1", 0.95), ("spanker-http", 0.6)];
        let after = spent(&tasks.map(|(name, seconds)| (name.to_owned(), seconds)));
        assert!((of_each(before, after, 1.0, 2, 1000) - 1e-4).abs() < 1e-12);
        assert_eq!(of_each(before, after, 1.0, 3, 1000).to_bits(), 0.0f64.to_bits());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn thread_that_works_is_seen_and_one_of_another_name_is_not_taken_for_it() {
        let burn = || {
            let begun = Instant::now();
            while begun.elapsed().as_millis() < 60 {
                std::hint::spin_loop();
            }
            tasks().map(|tasks| spent(&tasks)).expect("Linux tells")
        };
        let before = tasks().map(|tasks| spent(&tasks)).expect("Linux tells");
        let named = |name: &str| std::thread::Builder::new().name(name.into());
        let computing = named("spanker-card-0").spawn(burn).expect("a thread").join();
        assert!(computing.expect("no panic").computing > before.computing);
        let other = named("client").spawn(burn).expect("a thread").join();
        assert!(other.expect("no panic").other > before.other);
    }
}
