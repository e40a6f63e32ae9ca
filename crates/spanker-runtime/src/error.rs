// SPDX-License-Identifier: Apache-2.0
//! What can go wrong between a program and a card's driver. The errors carry what the operating
//! system said; they hold no advice and no text of their own invention.

use std::io;
use std::path::PathBuf;

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
    /// The device file could not be opened for reading and writing.
    #[error("cannot open {}", path.display())]
    Open {
        /// The file that was asked for.
        path: PathBuf,
        /// What the operating system answered.
        source: io::Error,
    },
    /// The driver refused or failed a request.
    #[error("ioctl {op} failed")]
    Ioctl {
        /// The request's name in the ABI, such as `GET_VERSION`.
        op: &'static str,
        /// The `errno` that the driver answered with.
        source: nix::Error,
    },
}

/// The result of an operation on a card.
pub type Result<T> = std::result::Result<T, Error>;
