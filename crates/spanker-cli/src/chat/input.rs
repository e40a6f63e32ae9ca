// SPDX-License-Identifier: Apache-2.0
//! What a person types: lines, commands, and Ctrl-C, which ends an answer and not the conversation.

use std::io::{BufRead, IsTerminal, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use anyhow::Context;
use spanker_engine::Stop;
use spanker_twin::Signals;

/// Bytes that a line may have.
const LONGEST: u64 = 1 << 20;
/// How often lines are looked for where nobody waits for a heartbeat.
const LOOK: Duration = Duration::from_secs(3600);

/// What a line is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input<'l> {
    /// An empty line.
    Nothing,
    /// `/name rest`.
    Command(&'l str, &'l str),
    /// What the model is asked. `//` begins a text with a slash.
    Text(&'l str),
}

impl<'l> Input<'l> {
    pub(super) fn of(line: &'l str) -> Input<'l> {
        let line = line.trim();
        match line.strip_prefix('/') {
            _ if line.is_empty() => Input::Nothing,
            Some(rest) if rest.starts_with('/') => Input::Text(rest),
            Some(rest) => {
                let (name, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
                Input::Command(name, rest.trim())
            }
            None => Input::Text(line),
        }
    }
}

/// A line, or why it cannot be used.
type Line = anyhow::Result<String>;
/// The same, or why there will be no more.
type Received = anyhow::Result<Line>;

/// Lines of standard input, read beside everything else.
pub(super) struct Lines {
    /// Whether a person types them.
    pub(super) watched: bool,
    lines: Receiver<Received>,
}

impl Lines {
    pub(super) fn read() -> Lines {
        let (sender, lines) = sync_channel(1);
        std::thread::spawn(move || {
            let mut input = std::io::stdin().lock();
            while let Some(line) = next_line(&mut input) {
                let last = line.is_err();
                if sender.send(line).is_err() || last {
                    return;
                }
            }
        });
        Lines { watched: std::io::stdin().is_terminal(), lines }
    }

    /// The next line; nothing at the end of input. `heartbeat` is called every so often meanwhile.
    pub(super) fn next(
        &self,
        every: Option<Duration>,
        heartbeat: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Option<Line>> {
        loop {
            match self.lines.recv_timeout(every.unwrap_or(LOOK)) {
                Ok(line) => return line.map(Some),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => heartbeat()?,
            }
        }
    }
}

/// A line; the rest of one that is too long is passed over.
fn next_line(input: &mut impl BufRead) -> Option<Received> {
    let mut bytes = Vec::new();
    match input.by_ref().take(LONGEST).read_until(b'\n', &mut bytes) {
        Ok(0) => return None,
        Ok(_) => {}
        Err(error) => return Some(Err(error).context("cannot read standard input")),
    }
    if bytes.len() as u64 == LONGEST && !bytes.ends_with(b"\n") {
        let mut rest = Vec::new();
        while !rest.ends_with(b"\n") {
            rest.clear();
            match input.by_ref().take(LONGEST).read_until(b'\n', &mut rest) {
                Ok(1..) => {}
                _ => break,
            }
        }
        return Some(Ok(Err(anyhow::anyhow!(
            "a line of more than {LONGEST} bytes is passed over"
        ))));
    }
    Some(Ok(String::from_utf8(bytes).map_err(|_| anyhow::anyhow!("a line that is not UTF-8"))))
}

/// Ctrl-C: ends an answer; where there is none, or the answer does not end, the program. So does a plain kill.
pub(super) struct Interrupts {
    busy: Arc<AtomicBool>,
}

impl Interrupts {
    pub(super) fn watch(stop: &Stop) -> anyhow::Result<Interrupts> {
        let signals = Signals::take()?;
        let busy = Arc::new(AtomicBool::new(false));
        let (stop, at_work) = (stop.clone(), Arc::clone(&busy));
        signals.watch(move |caught| {
            if caught.kill {
                std::process::exit(143);
            }
            if !at_work.load(Ordering::Relaxed) || stop.is_stopped() {
                std::process::exit(130);
            }
            stop.stop();
        });
        Ok(Interrupts { busy })
    }

    /// Nothing is being answered.
    pub(super) fn idle(&self) {
        self.busy.store(false, Ordering::Relaxed);
    }

    /// Something is: what stopped the last answer does not stop this one.
    pub(super) fn busy(&self, stop: &Stop) {
        stop.reset();
        self.busy.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_text_commands_or_nothing() {
        assert_eq!(Input::of(" \n"), Input::Nothing);
        assert_eq!(Input::of("hello there\n"), Input::Text("hello there"));
        assert_eq!(Input::of("/save a b.json\n"), Input::Command("save", "a b.json"));
        assert_eq!(Input::of("/reset"), Input::Command("reset", ""));
        assert_eq!(Input::of("//etc is a path"), Input::Text("/etc is a path"));
    }

    #[test]
    fn line_that_is_too_long_is_passed_over_and_the_next_one_is_read() {
        let mut text = vec![b'a'; 3 * LONGEST as usize / 2];
        text.extend_from_slice(b"\nhello\n");
        let mut input = &text[..];
        assert!(next_line(&mut input).is_some_and(|line| line.is_ok_and(|line| line.is_err())));
        let line = next_line(&mut input).and_then(Result::ok).and_then(Result::ok);
        assert_eq!(line.as_deref(), Some("hello\n"));
        assert!(next_line(&mut input).is_none());
    }

    #[test]
    fn input_that_cannot_be_read_is_an_end() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
                Err(std::io::Error::other("broken"))
            }
        }
        let mut input = std::io::BufReader::new(Broken);
        assert!(next_line(&mut input).is_some_and(|line| line.is_err()));
    }
}
