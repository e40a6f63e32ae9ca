// SPDX-License-Identifier: Apache-2.0
//! How ends wait: for several connections at once, asleep in the kernel, and never past a deadline.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::link::Link;

/// What is left until a moment.
pub(crate) fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

/// Waits until one of these can go on, but not longer than `most`. Which of them can, in order.
pub(crate) fn sleep_on(sockets: &[(BorrowedFd<'_>, PollFlags)], most: Duration) -> Vec<bool> {
    let fds = sockets.iter().map(|(socket, flags)| PollFd::from_borrowed_fd(*socket, *flags));
    let mut fds: Vec<_> = fds.collect();
    // A signal or a refusal of the kernel looks as if the time were over: whoever waits looks at the clock.
    let _ = poll(&mut fds, Some(&timespec(most)));
    fds.iter().map(|fd| !fd.revents().is_empty()).collect()
}

/// The same for connections: until something unsent can be written, or something comes over those that are to be read.
pub(crate) fn sleep_on_links<'l>(links: impl Iterator<Item = (&'l Link, bool)>, most: Duration) {
    let flags = |link: &Link, reads: bool| {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, reads);
        flags.set(PollFlags::OUT, link.has_unsent());
        flags
    };
    let open = links.filter(|(link, _)| link.closed().is_none());
    let sockets = open.map(|(link, reads)| (link.as_fd(), flags(link, reads)));
    // One of which nothing is wanted would still wake up whoever sleeps, again and again, once it is closed.
    let sockets: Vec<_> = sockets.filter(|(_, flags)| !flags.is_empty()).collect();
    sleep_on(&sockets, most);
}

/// Not less, so that a deadline has passed when the kernel says so.
fn timespec(most: Duration) -> Timespec {
    let most = most.min(Duration::from_secs(3600));
    Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) as _ }
}
