// SPDX-License-Identifier: Apache-2.0
//! Signals as something to poll, so that no code runs in a handler.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::TwinError;
use crate::error::Tried;

/// What has been asked of this process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Caught {
    /// To end: an interrupt from the terminal, its end, or a plain kill.
    pub end: bool,
    /// To end by all means: the terminal's end, or a plain kill.
    pub kill: bool,
    /// A child has ended.
    pub child: bool,
}

/// The signals of this process, blocked so that they do not interrupt it.
#[derive(Debug)]
pub struct Signals {
    fd: SignalFd,
}

impl Signals {
    /// Keeps INT, TERM, HUP and CHLD for [`Signals::caught`]. Threads and processes that are started
    /// later inherit this, so it comes first.
    ///
    /// # Errors
    /// What the system says.
    pub fn take() -> Result<Signals, TwinError> {
        let mut set = SigSet::empty();
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD] {
            set.add(signal);
        }
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let fd = set.thread_block().and_then(|()| SignalFd::with_flags(&set, flags));
        fd.map(|fd| Signals { fd }).tried(|| "catch signals".into())
    }

    /// Lets signals through again, for a process that has inherited a mask; all but HUP. The kernel sends
    /// that to stopped processes that lose their parent, and a card has to clean up then.
    ///
    /// # Errors
    /// What the system says.
    pub fn let_through() -> Result<(), TwinError> {
        let mut set = SigSet::empty();
        set.add(Signal::SIGHUP);
        set.thread_set_mask().tried(|| "unblock signals".into())
    }

    /// What has come since the last call.
    #[must_use]
    pub fn caught(&self) -> Caught {
        let mut caught = Caught::default();
        while let Ok(Some(signal)) = self.fd.read_signal() {
            let number = signal.ssi_signo as i32;
            match number == Signal::SIGCHLD as i32 {
                true => caught.child = true,
                false => caught.end = true,
            }
            caught.kill |=
                [Signal::SIGTERM, Signal::SIGHUP].iter().any(|&kill| number == kill as i32);
        }
        caught
    }

    /// Calls `heard` with every signal that asks to end, on a thread of its own.
    pub fn watch(self, mut heard: impl FnMut(Caught) + Send + 'static) {
        std::thread::spawn(move || {
            loop {
                let [] = self.wait([], None);
                let caught = self.caught();
                if caught.end {
                    heard(caught);
                }
            }
        });
    }

    /// Waits until a signal has come or one of `others` has something to read or has ended, and says
    /// which of the others; `None` waits for ever.
    #[must_use]
    pub fn wait<const N: usize>(
        &self,
        others: [Option<BorrowedFd<'_>>; N],
        timeout: Option<Duration>,
    ) -> [bool; N] {
        let flags = PollFlags::IN | PollFlags::RDHUP;
        let mut fds = vec![PollFd::from_borrowed_fd(self.fd.as_fd(), flags)];
        let known = others.into_iter().flatten();
        fds.extend(known.map(|fd| PollFd::from_borrowed_fd(fd, flags)));
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        let _ = poll(&mut fds, timeout.as_ref());
        let mut polled = fds[1..].iter().map(|fd| !fd.revents().is_empty());
        others.map(|other| other.is_some() && polled.next().unwrap_or(false))
    }
}
