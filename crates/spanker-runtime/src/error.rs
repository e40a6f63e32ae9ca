// SPDX-License-Identifier: Apache-2.0
//! What can go wrong between a program and a card.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::{AbiVersion, Fault, Feature, Ticket};

/// A failed operation on a card.
///
/// # Examples
///
/// ```
/// use spanker_runtime::{Error, SpankerControl};
///
/// match SpankerControl::open_path("no/such/card") {
///     Err(Error::Open { path, source }) => {
///         assert_eq!(path.to_str(), Some("no/such/card"));
///         assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
///     }
///     other => panic!("unexpected {other:?}"),
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device could not be opened for reading and writing.
    #[error("cannot open {}", path.display())]
    Open {
        /// The file that was asked for.
        path: PathBuf,
        /// What the operating system answered.
        source: io::Error,
    },
    /// The card refused or failed a request, whichever way the request travelled.
    #[error("ioctl {op} failed")]
    Ioctl {
        /// The request's name in the ABI, such as `GET_VERSION`.
        op: &'static str,
        /// The `errno` that the card answered with.
        source: nix::Error,
    },
    /// The card speaks another major version of the ABI. The patch is 0 if the card did not tell it.
    #[error("the card speaks ABI {theirs}, this program {}", AbiVersion::OURS)]
    Version {
        /// The card's version.
        theirs: AbiVersion,
    },
    /// The card's minor version of the ABI is too old for a request or for work. Nothing was asked of it.
    #[error("{feature} needs ABI {}, the card speaks {theirs}", feature.since_version())]
    Unsupported {
        /// What the card has not.
        feature: Feature,
        /// The card's version.
        theirs: AbiVersion,
    },
    /// The card went away.
    #[error("the card is gone ({op})")]
    Gone {
        /// The request that found out.
        op: &'static str,
    },
    /// The card did not answer in time.
    #[error("no answer to {op} in {} ms", waited.as_millis())]
    Unresponsive {
        /// The request.
        op: &'static str,
        /// How long was waited.
        waited: Duration,
    },
    /// The card's answer is none.
    #[error("the answer to {op} is nonsense: {what}")]
    Nonsense {
        /// The request.
        op: &'static str,
        /// What is wrong with the answer.
        what: String,
    },
    /// Work is not complete yet.
    #[error("work {} is not complete after {} ms", ticket.0, waited.as_millis())]
    Incomplete {
        /// The work.
        ticket: Ticket,
        /// How long was waited.
        waited: Duration,
    },
    /// Work failed.
    #[error("work failed: {0}")]
    Fault(Fault),
}

/// The result of an operation on a card.
pub type Result<T> = std::result::Result<T, Error>;
