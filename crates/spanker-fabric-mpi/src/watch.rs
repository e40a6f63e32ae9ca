// SPDX-License-Identifier: Apache-2.0
//! Whether the ranks of this host live. Ranks of other hosts are not watched.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

/// The processes of this host's ranks.
#[derive(Debug)]
pub(crate) struct Watch {
    rank: usize,
    peers: Vec<Option<Peer>>,
    dead: Vec<AtomicBool>,
}

#[derive(Debug)]
struct Peer {
    pid: i32,
    sight: Sight,
}

/// How a process is watched.
#[derive(Debug)]
enum Sight {
    /// The kernel says when it ends, also before anybody has asked for its exit code.
    Descriptor(OwnedFd),
    /// By its number and when it started, where the kernel has no such descriptors.
    Number(Option<u64>),
}

/// When a process started, and what it is doing: the fields of its line in `/proc`.
fn stat(pid: i32) -> Option<(char, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may contain anything.
    let rest = text.rsplit_once(')')?.1;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

impl Watch {
    /// Watches the processes of `pids` that are on this host.
    pub(crate) fn new(rank: usize, pids: &[Option<i32>]) -> Watch {
        let peer = |(other, pid): (usize, &Option<i32>)| {
            let pid = (*pid).filter(|_| other != rank)?;
            let sight = match Pid::from_raw(pid).map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
                Some(Ok(descriptor)) => Sight::Descriptor(descriptor),
                _ => Sight::Number(stat(pid).map(|(_, started)| started)),
            };
            Some(Peer { pid, sight })
        };
        Watch {
            rank,
            peers: pids.iter().enumerate().map(peer).collect(),
            dead: pids.iter().map(|_| AtomicBool::new(false)).collect(),
        }
    }

    /// Marks a rank as dead, whoever found out.
    pub(crate) fn bury(&self, rank: usize) {
        self.dead[rank].store(true, Ordering::Release);
    }

    /// Whether a rank is known to be dead.
    pub(crate) fn is_dead(&self, rank: usize) -> bool {
        self.dead[rank].load(Ordering::Acquire)
    }

    /// Whether some ranks are on hosts that nobody here can see.
    pub(crate) fn is_partial(&self) -> bool {
        self.peers.iter().enumerate().any(|(rank, peer)| peer.is_none() && rank != self.rank)
    }

    /// Checks all processes. Returns the first rank that is dead.
    pub(crate) fn check(&self) -> Option<usize> {
        for (rank, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            if !self.is_dead(rank) && peer.has_ended() {
                self.bury(rank);
            }
        }
        (0..self.dead.len()).find(|&rank| self.is_dead(rank))
    }

    /// Whether this is the lowest rank that lives, as far as anybody here knows: the one that speaks for all.
    pub(crate) fn is_lowest(&self) -> bool {
        (0..self.rank).all(|rank| self.is_dead(rank))
    }

    /// The ranks of this host that somebody has stopped, with their processes.
    pub(crate) fn stopped(&self) -> Vec<(usize, i32)> {
        let halted = |peer: &Peer| matches!(stat(peer.pid), Some(('T' | 't', _)));
        let peers = self.peers.iter().enumerate();
        peers
            .filter_map(|(rank, peer)| Some((rank, peer.as_ref()?)))
            .filter(|(_, peer)| halted(peer))
            .map(|(rank, peer)| (rank, peer.pid))
            .collect()
    }
}

impl Peer {
    fn has_ended(&self) -> bool {
        match &self.sight {
            Sight::Descriptor(descriptor) => {
                let mut fds = [PollFd::new(descriptor, PollFlags::IN)];
                let now = Timespec { tv_sec: 0, tv_nsec: 0 };
                matches!(poll(&mut fds, Some(&now)), Ok(1..))
            }
            Sight::Number(started) => {
                let gone =
                    Pid::from_raw(self.pid).is_none_or(|pid| test_kill_process(pid).is_err());
                let state = stat(self.pid);
                gone || match (state, started) {
                    (Some(('Z' | 'X', _)), _) => true,
                    (Some((_, now)), Some(then)) => now != *then,
                    _ => false,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_that_ends_is_seen_before_anybody_waits_for_it() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let watch = Watch::new(0, &[None, Some(child.id() as i32), None]);
        assert_eq!(watch.check(), None);
        assert!(watch.is_partial(), "rank 2 is elsewhere");
        child.kill().expect("ours");
        while watch.check().is_none() {
            std::thread::yield_now();
        }
        assert_eq!(watch.check(), Some(1));
        assert!(watch.is_lowest());
        child.wait().expect("it ended");
    }

    #[test]
    fn the_lowest_rank_that_lives_speaks() {
        let own = std::process::id() as i32;
        let watch = Watch::new(2, &[Some(own), Some(own), Some(own)]);
        assert!(!watch.is_lowest());
        watch.bury(0);
        assert!(!watch.is_lowest());
        watch.bury(1);
        assert!(watch.is_lowest());
    }
}
