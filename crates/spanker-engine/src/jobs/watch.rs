// SPDX-License-Identifier: Apache-2.0
//! Waiting for work on one card, and taking it back from a card that does not get on with it. Groups of cards are
//! `spanker-fabric`'s.

use std::time::Duration;

use spanker_fabric::device::Deadline;
use spanker_runtime::{Error, Fault, FaultKind, REQUEST_TIMEOUT, SpankerControl, Ticket};

/// The longest wait before someone looks whether the work is still wanted.
const LONGEST_SLICE: Duration = Duration::from_millis(100);

/// Why work did not end.
#[derive(Debug)]
pub(crate) enum Unfinished {
    /// The card failed, or failed the work.
    Card(Error),
    /// The card is well, and still has the work: what it is to be told, and the same in words.
    Pending(FaultKind, String),
}

/// Waits until work is complete, in slices. Time is counted in them, so that it may be virtual.
pub(crate) fn watch(
    card: &SpankerControl,
    ticket: Ticket,
    deadline: Deadline,
    is_wanted: impl Fn() -> bool,
) -> Result<(), Unfinished> {
    let Deadline { detect, total, .. } = deadline;
    let slice = (detect / 2).clamp(Duration::from_millis(1), LONGEST_SLICE);
    let (mut spent, mut quiet, mut before) = (Duration::ZERO, Duration::ZERO, None);
    loop {
        match card.wait(ticket, slice) {
            Ok(_) => return Ok(()),
            Err(Error::Incomplete { .. }) => {}
            Err(error) => return Err(Unfinished::Card(error)),
        }
        let state = card.state(REQUEST_TIMEOUT).map_err(Unfinished::Card)?;
        quiet = if before == Some(state.progress) { quiet + slice } else { Duration::ZERO };
        before = Some(state.progress);
        spent += slice;
        if quiet >= detect {
            let what = format!("no progress for {} ms", detect.as_millis());
            return Err(Unfinished::Pending(FaultKind::Stuck, what));
        }
        if spent >= total {
            let what = format!("not done after {} ms", total.as_millis());
            return Err(Unfinished::Pending(FaultKind::Slow, what));
        }
        if !is_wanted() {
            let what = "nobody wants it any more".to_owned();
            return Err(Unfinished::Pending(FaultKind::Aborted, what));
        }
    }
}

/// Takes work back from a card. When this succeeds, the card has let go of its buffers.
pub(crate) fn take_back(card: &SpankerControl, ticket: Ticket, fault: Fault) -> Result<(), Error> {
    card.abort(fault)?;
    match card.wait(ticket, LONGEST_SLICE) {
        Ok(_) | Err(Error::Fault(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// An error with what the system says.
pub(crate) fn words(error: &Error) -> String {
    match error {
        Error::Ioctl { op, source } => format!("{op} refused ({})", source.desc()),
        other => other.to_string(),
    }
}
