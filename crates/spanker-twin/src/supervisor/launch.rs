// SPDX-License-Identifier: Apache-2.0
//! The processes of a twin as they begin: the one that starts a supervisor in the background, the supervisor, a card.

use std::ffi::CString;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal, setsid};

use super::{News, Program, TwinSpec, supervise};
use crate::control::Status;
use crate::error::Tried;
use crate::{Signals, TwinError, frame, home, serve};

/// How long a supervisor may take from its start until it is done starting or has cleaned up.
const TIMEOUT: Duration = Duration::from_secs(15);

/// How long a card that has lost its supervisor may take to leave by itself.
const LEAVING: Duration = Duration::from_secs(1);

/// Starts a supervisor in the background and waits until its twin is up. A signal in the meantime takes
/// everything down again, and so does the end of this process.
///
/// # Errors
/// What the supervisor says, or [`TwinError::Interrupted`]. Nothing is left then.
pub fn launch(
    program: &Program,
    spec: &TwinSpec,
    signals: &Signals,
    report: &mut dyn FnMut(News),
) -> Result<Status, TwinError> {
    let (starter, theirs) = UnixStream::pair().tried(|| "make a socket".into())?;
    let mut command = Command::new(&program.path);
    command.arg0(&program.name).args(["twin", "keeper"]).arg(&spec.dir).current_dir("/");
    command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().tried(|| format!("start {}", program.path.display()))?;
    // With it goes this process's copy of the supervisor's end, so that the supervisor's death is seen.
    drop(command);
    let outcome = frame::send(&starter, spec, &[])
        .tried(|| "talk to the supervisor".into())
        .and_then(|()| await_ready(&starter, signals, report));
    if outcome.is_err() {
        dismiss(&starter, child);
    }
    outcome
}

fn await_ready(
    starter: &UnixStream,
    signals: &Signals,
    report: &mut dyn FnMut(News),
) -> Result<Status, TwinError> {
    let end = Instant::now() + TIMEOUT;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let [spoke] = signals.wait([Some(starter.as_fd())], Some(left));
        if signals.caught().end {
            return Err(TwinError::Interrupted);
        }
        if left.is_zero() {
            return Err(TwinError::Failed("the supervisor does not answer".into()));
        }
        if !spoke {
            continue;
        }
        match frame::receive(starter, Some(end)) {
            Ok(Some((News::Ready(status), _))) => return Ok(*status),
            Ok(Some((News::Failed { message, hint }, _))) => {
                return Err(TwinError::Reported { message, hint });
            }
            Ok(Some((news, _))) => report(news),
            Ok(None) => return Err(TwinError::Failed("the supervisor has ended".into())),
            Err(error) => return Err(error).tried(|| "understand the supervisor".into()),
        }
    }
}

/// Lets a supervisor clean up, and kills it if it does not: its cards then do.
fn dismiss(starter: &UnixStream, mut child: Child) {
    let _ = starter.shutdown(std::net::Shutdown::Both);
    // One that has just reported that everything is up does not read this socket any more.
    let _ = kill_process(Pid::from_child(&child), Signal::TERM);
    let end = Instant::now() + TIMEOUT;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The stream that this process was started with.
fn given() -> Result<UnixStream, TwinError> {
    let fd = io::stdin().as_fd().try_clone_to_owned().tried(|| "use standard input".into())?;
    Ok(UnixStream::from(fd))
}

/// The name that process lists show.
fn named(name: &str) {
    if let Ok(name) = CString::new(name) {
        // Only for people who list processes.
        let _ = rustix::thread::set_name(&name);
    }
}

/// A supervisor in the background. Standard input is the socket to who started it.
///
/// # Errors
/// Standard input is no such socket. Any later error is reported over it.
pub fn daemon() -> Result<(), TwinError> {
    let signals = Signals::take()?;
    // Its own session: the end of the terminal is not the end of the twin. Who leads one already stays.
    let _ = setsid();
    named("spanker twin");
    let starter = given()?;
    let spec = match frame::receive::<TwinSpec>(&starter, Some(Instant::now() + TIMEOUT)) {
        Ok(Some((spec, _))) => spec,
        // Whoever started it has died already.
        Ok(None) => return Ok(()),
        Err(error) => return Err(error).tried(|| "understand who started the supervisor".into()),
    };
    // Whoever does not listen any more is noticed where it matters.
    let mut report = |news: News| frame::send(&starter, &news, &[]).is_ok();
    let program = Program::this(true)?;
    let outcome = supervise(&spec, program, &signals, Some(&starter), &mut report);
    if let Err(error) = outcome {
        let hint = error.hint().map(str::to_owned);
        report(News::Failed { message: error.whole(), hint });
    }
    Ok(())
}

/// A card. Standard input is the socket to its supervisor; `dir` is the twin's directory. Without its supervisor
/// the card leaves, and cleans up what the supervisor can no longer clean up.
///
/// # Errors
/// Standard input is no such socket, or orders cannot be understood.
pub fn card(dir: &Path, index: u32) -> Result<(), TwinError> {
    Signals::let_through()?;
    named(&format!("spanker card {index}"));
    // A stopped card goes on when its supervisor dies, to see that it must leave. A kill would be surer, but
    // then nobody would be left to clean up.
    set_parent_process_death_signal(Some(Signal::CONT)).tried(|| "watch the supervisor".into())?;
    let control = given()?;
    let watched = control.try_clone().tried(|| "watch the supervisor".into())?;
    let (copy, place) =
        (control.try_clone().tried(|| "watch the supervisor".into())?, dir.to_path_buf());
    std::thread::spawn(move || {
        hung_up(&copy, None);
        // A card that is too busy to see it, or hangs, must not outlive its supervisor.
        std::thread::sleep(LEAVING);
        let _ = home::sweep(&place);
        std::process::exit(1);
    });
    let outcome = serve(control).tried(|| format!("go on as card {index}"));
    if hung_up(&watched, Some(Duration::ZERO)) {
        // What cannot be removed is left to the next twin in this directory.
        let _ = home::sweep(dir);
    }
    match outcome {
        Err(TwinError::System { source, .. }) if source.kind() == ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome,
    }
}

/// Waits until the other end of a stream is closed; says whether it is.
fn hung_up(stream: &UnixStream, timeout: Option<Duration>) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let timeout = timeout.and_then(|time| rustix::event::Timespec::try_from(time).ok());
    loop {
        match poll(&mut fds, timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            _ => return !fds[0].revents().is_empty(),
        }
    }
}
