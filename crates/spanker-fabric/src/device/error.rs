// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with a group of cards, as one error that names the culprit.

use std::error::Error as StdError;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use spanker_runtime::{Error, FaultKind};

/// What happened to a group of cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceErrorKind {
    /// A card is gone.
    Lost,
    /// A card answers nobody, or does not go on.
    Stuck,
    /// A link between two cards is down.
    LinkDown,
    /// A card takes longer than it may.
    Slow,
    /// A card computes or answers nonsense.
    Wrong,
    /// A card sent another message than its neighbour expected.
    Mismatch,
    /// Somebody gave the job up.
    Aborted,
    /// Another program has work on a card.
    Busy,
    /// Two cards of the group are not connected through the group.
    Unreachable,
    /// The group or a card cannot do what was asked.
    Refused,
}

/// A failed operation on a group of cards. Every card of the group has failed the job with the same fault.
///
/// Cards are named by index, the number in their device's name. The buffers of the caller are as they were.
/// [`DeviceError::card_buffers_trusted`] says whether those on the cards are.
///
/// Who is named when several things are wrong at once: a card that is gone, before a card that does not
/// answer, before a card that answers nonsense, before a link that is down, before anything else that cards
/// report; among equals the first in the group.
#[derive(Debug, Clone)]
pub struct DeviceError {
    kind: DeviceErrorKind,
    card: Option<usize>,
    peer: Option<usize>,
    detail: String,
    waiting: Vec<(usize, String)>,
    started: bool,
    source: Option<Arc<Error>>,
}

impl DeviceError {
    pub(super) fn new(kind: DeviceErrorKind, card: Option<usize>, detail: String) -> Self {
        let (peer, waiting, started, source) = (None, Vec::new(), false, None);
        DeviceError { kind, card, peer, detail, waiting, started, source }
    }

    /// A request that no card can satisfy.
    pub(super) fn refused(detail: impl fmt::Display) -> Self {
        DeviceError::new(DeviceErrorKind::Refused, None, detail.to_string())
    }

    /// A card whose result is not what it must be.
    #[must_use]
    pub fn wrong(card: usize, detail: String) -> Self {
        DeviceError {
            started: true,
            ..DeviceError::new(DeviceErrorKind::Wrong, Some(card), detail)
        }
    }

    /// A request that card `card` did not satisfy.
    #[must_use]
    pub fn request(card: usize, error: Error) -> Self {
        let kind = match &error {
            Error::Gone { .. } => DeviceErrorKind::Lost,
            Error::Unresponsive { .. } => DeviceErrorKind::Stuck,
            Error::Nonsense { .. } => DeviceErrorKind::Wrong,
            Error::Ioctl { source: Errno::EBUSY, .. } => DeviceErrorKind::Busy,
            _ => DeviceErrorKind::Refused,
        };
        let detail = match (&error, kind) {
            (Error::Ioctl { op, source }, DeviceErrorKind::Refused) => {
                format!("{op} refused ({})", source.desc())
            }
            (_, DeviceErrorKind::Lost | DeviceErrorKind::Busy) => String::new(),
            _ => error.to_string(),
        };
        let source = Some(Arc::new(error));
        DeviceError { source, ..DeviceError::new(kind, Some(card), detail) }
    }

    /// A question about the card at `path` or about its links that card `card` did not answer. The error names
    /// the question and the path, whatever its kind.
    #[must_use]
    pub fn discovery(card: usize, path: Option<&Path>, error: Error) -> Self {
        let place = path.map_or_else(String::new, |path| format!(" at {}", path.display()));
        let gone = match &error {
            Error::Gone { op } => Some(format!("no answer to {op}")),
            Error::Ioctl { op, source: Errno::EBUSY } => Some(format!("{op} refused")),
            _ => None,
        };
        let error = DeviceError::request(card, error);
        let detail = gone.unwrap_or_else(|| error.detail.clone()) + &place;
        DeviceError { detail, ..error }
    }

    pub(super) fn with_peer(mut self, peer: Option<usize>) -> Self {
        self.peer = peer;
        self
    }

    pub(super) fn with_waiting(mut self, waiting: Vec<(usize, String)>) -> Self {
        self.waiting = waiting;
        self
    }

    /// The same error, once cards have begun to work.
    pub(super) fn after_start(mut self) -> Self {
        self.started = true;
        self
    }

    /// What happened.
    #[must_use]
    pub fn kind(&self) -> DeviceErrorKind {
        self.kind
    }

    /// The index of the card at fault, or of one end of the link.
    #[must_use]
    pub fn card(&self) -> Option<usize> {
        self.card
    }

    /// For a link, the index of the card at its other end.
    #[must_use]
    pub fn peer(&self) -> Option<usize> {
        self.peer
    }

    /// What each card was doing when the error was found: its index, and words such as `receiving from
    /// card 2`. Empty if nobody was asked.
    #[must_use]
    pub fn waiting(&self) -> &[(usize, String)] {
        &self.waiting
    }

    /// Whether the buffers on the cards still hold what was written to them. Collectives work in place, so
    /// they do not once a card has begun.
    #[must_use]
    pub fn card_buffers_trusted(&self) -> bool {
        !self.started
    }

    /// Its numbers as the card ABI encodes them.
    pub(super) fn fault_kind(&self) -> FaultKind {
        match self.kind {
            DeviceErrorKind::Lost => FaultKind::CardLost,
            DeviceErrorKind::Stuck => FaultKind::Stuck,
            DeviceErrorKind::LinkDown => FaultKind::LinkDown,
            DeviceErrorKind::Slow => FaultKind::Slow,
            DeviceErrorKind::Wrong => FaultKind::Wrong,
            DeviceErrorKind::Mismatch => FaultKind::Mismatch,
            _ => FaultKind::Aborted,
        }
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |index: Option<usize>| match index {
            Some(index) => format!("card {index}"),
            None => "a card".to_owned(),
        };
        let (card, peer) = (named(self.card), named(self.peer));
        match self.kind {
            DeviceErrorKind::Lost => write!(f, "{card} is gone")?,
            DeviceErrorKind::Stuck => write!(f, "{card} is stuck")?,
            DeviceErrorKind::LinkDown => write!(f, "the link between {card} and {peer} is down")?,
            DeviceErrorKind::Slow => write!(f, "{card} is too slow")?,
            DeviceErrorKind::Wrong => write!(f, "{card} gives wrong answers")?,
            DeviceErrorKind::Mismatch => {
                write!(f, "{card} sent another message than its neighbour expected")?;
            }
            DeviceErrorKind::Aborted => write!(f, "the job was given up")?,
            DeviceErrorKind::Busy => write!(f, "{card} is at work for another program")?,
            DeviceErrorKind::Unreachable => write!(f, "{card} cannot reach {peer}")?,
            DeviceErrorKind::Refused => match self.card {
                Some(_) => return write!(f, "{card}: {}", self.detail),
                None => return f.write_str(&self.detail),
            },
        }
        if self.detail.is_empty() { Ok(()) } else { write!(f, ": {}", self.detail) }
    }
}

impl StdError for DeviceError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|error| error as &(dyn StdError + 'static))
    }
}
