// SPDX-License-Identifier: Apache-2.0
//! One card as its supervisor sees it: a process, a socket to it, and what was done to it.

use std::io::{self, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::Program;
use crate::error::Tried;
use crate::orders::{self, Order, Reply};
use crate::{CardSpec, TwinError};

/// What was done to a card. It ends with the process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Faults {
    pub(super) stopped: bool,
    pub(super) stuck: bool,
    pub(super) garbling: bool,
    pub(super) slow: f64,
}

const NONE: Faults = Faults { stopped: false, stuck: false, garbling: false, slow: 1.0 };

/// A card.
#[derive(Debug)]
pub(super) struct Card {
    pub(super) spec: CardSpec,
    pub(super) faults: Faults,
    process: Result<Process, String>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    control: UnixStream,
    /// Orders without a reply so far. Replies come in order, so what is owed is read first.
    owed: usize,
}

impl Card {
    /// A card whose process is not started.
    pub(super) fn new(spec: CardSpec) -> Card {
        Card { spec, faults: NONE, process: Err("never started".into()) }
    }

    fn name(&self) -> String {
        format!("card {}", self.spec.index)
    }

    /// Starts the process. It waits for its first order.
    pub(super) fn spawn(&mut self, program: &Program, dir: &Path) -> Result<(), TwinError> {
        let (control, theirs) = UnixStream::pair().tried(|| "make a socket".into())?;
        // A stopped card reads nothing; its supervisor must not block on that.
        control
            .set_write_timeout(Some(Duration::from_secs(1)))
            .tried(|| "set up a socket".into())?;
        let mut command = Command::new(&program.path);
        command.arg0(&program.name).args(["twin", "card"]).arg(dir);
        command.arg(self.spec.index.to_string());
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        command.stderr(if program.quiet { Stdio::null() } else { Stdio::inherit() });
        // An interrupt from the terminal is for the supervisor, which then ends its cards in good order.
        command.process_group(0).current_dir("/");
        let child = command.spawn().tried(|| format!("start {}", program.path.display()))?;
        self.process = Ok(Process { child, control, owed: 0 });
        self.faults = NONE;
        Ok(())
    }

    /// The process, if it lives.
    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref().ok().map(|process| process.child.id())
    }

    /// How it ended, if it did.
    pub(super) fn end(&self) -> Option<&str> {
        self.process.as_ref().err().map(String::as_str)
    }

    fn process(&mut self) -> Result<&mut Process, TwinError> {
        let name = self.name();
        self.process
            .as_mut()
            .map_err(|end| TwinError::Failed(format!("{name} is dead ({end}): restore it first")))
    }

    /// Gives an order without waiting for the reply.
    pub(super) fn send(&mut self, order: &Order, fds: &[BorrowedFd<'_>]) -> Result<(), TwinError> {
        let name = self.name();
        let process = self.process()?;
        orders::send(&process.control, order, fds).tried(|| format!("give {name} an order"))?;
        process.owed += 1;
        Ok(())
    }

    /// Waits for the reply to the last order. A stopped card replies when it goes on, so nobody waits.
    pub(super) fn hear(&mut self, deadline: Instant) -> Result<Reply, TwinError> {
        let name = self.name();
        if self.faults.stopped {
            return Ok(Reply::Done);
        }
        let process = self.process()?;
        let mut last = Reply::Done;
        while process.owed > 0 {
            last = match orders::reply(&process.control, deadline) {
                Ok(Some(reply)) => reply,
                Ok(None) => return Err(TwinError::Failed(format!("{name} has ended"))),
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    return Err(TwinError::Failed(format!("{name} does not answer")));
                }
                Err(error) => return Err(error).tried(|| format!("understand {name}")),
            };
            process.owed -= 1;
        }
        match last {
            Reply::Failed(text) => Err(TwinError::Failed(format!("{name}: {text}"))),
            reply => Ok(reply),
        }
    }

    /// Gives an order and waits until it is carried out.
    pub(super) fn order(
        &mut self,
        order: &Order,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Reply, TwinError> {
        self.send(order, fds)?;
        self.hear(Instant::now() + super::ANSWER)
    }

    /// Gives an order that a dead card does not need. It may die of it, too.
    pub(super) fn order_if_alive(
        &mut self,
        order: &Order,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), TwinError> {
        if self.process.is_err() {
            return Ok(());
        }
        match self.order(order, fds) {
            Err(_) if self.reap() => Ok(()),
            outcome => outcome.map(drop),
        }
    }

    /// Sends the process a signal.
    pub(super) fn signal(&mut self, signal: Signal) -> Result<(), TwinError> {
        let name = self.name();
        // The process is ours and not waited for, so the number is still its own.
        let pid = Pid::from_child(&self.process()?.child);
        kill_process(pid, signal).tried(|| format!("send {name} a signal"))
    }

    /// Notices whether the process has ended; says so once.
    pub(super) fn reap(&mut self) -> bool {
        let Ok(process) = &mut self.process else { return false };
        match process.child.try_wait() {
            Ok(None) => false,
            outcome => {
                self.bury(outcome.map(|status| status.unwrap_or_default()));
                true
            }
        }
    }

    /// Kills the process and waits until it is gone.
    pub(super) fn kill(&mut self) {
        if let Ok(process) = &mut self.process {
            // It may have ended by itself.
            let _ = process.child.kill();
            let outcome = process.child.wait();
            self.bury(outcome);
        }
    }

    fn bury(&mut self, outcome: io::Result<ExitStatus>) {
        let end = match outcome {
            Err(error) => error.to_string(),
            Ok(status) => match (status.signal(), status.code()) {
                (Some(signal), _) => format!("signal {signal}"),
                (None, code) => format!("exit code {}", code.unwrap_or(0)),
            },
        };
        self.process = Err(end);
        self.faults = NONE;
    }
}
