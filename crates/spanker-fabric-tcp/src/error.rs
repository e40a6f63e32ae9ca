// SPDX-License-Identifier: Apache-2.0
//! What can go wrong before and besides the faults of a group.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use spanker_fabric::FabricError;

/// Why there is no connection, no answer or no group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TcpError {
    /// The system has no random numbers.
    #[error("the system gives no random numbers")]
    Random,
    /// A text is no key.
    #[error("this is no key: {reason}")]
    KeyText {
        /// Why not. The text itself is not shown.
        reason: String,
    },
    /// A file that is to have a key.
    #[error("key file {}: {reason}", path.display())]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// An address that others can reach, without a key.
    #[error(
        "{address} is not on this machine: a key is needed\nhint: `spanker key new FILE` makes one; both ends take it with --key-file FILE"
    )]
    KeyNeeded {
        /// The address.
        address: SocketAddr,
    },
    /// Text that is no address, or a name that nobody knows.
    #[error("{text}: {reason}")]
    Address {
        /// The text.
        text: String,
        /// Why not.
        reason: String,
    },
    /// The system refused something.
    #[error("{what} {address}: {reason}")]
    System {
        /// What was tried.
        what: &'static str,
        /// With which address.
        address: SocketAddr,
        /// What the system said.
        reason: String,
    },
    /// The other end closed the connection in the handshake, as it does for every reason.
    #[error(
        "{address} refused the handshake\nhint: do both ends have the same key, and the same version of the protocol?"
    )]
    Handshake {
        /// The other end.
        address: SocketAddr,
    },
    /// The other end closed the connection.
    #[error("{address} closed the connection")]
    Closed {
        /// The other end.
        address: SocketAddr,
    },
    /// What came is not what was sent, or makes no sense.
    #[error("{address}: {what}")]
    Corrupt {
        /// The other end.
        address: SocketAddr,
        /// What came.
        what: &'static str,
    },
    /// A message that is longer than its receiver takes.
    #[error("{address} sends a message of {length} bytes, at most {limit} are taken")]
    TooLong {
        /// The other end.
        address: SocketAddr,
        /// Bytes of the message.
        length: u64,
        /// Bytes that are taken.
        limit: u64,
    },
    /// Nothing came in time.
    #[error("{address}: no {what} within {} ms", timeout.as_millis())]
    Timeout {
        /// The other end.
        address: SocketAddr,
        /// What was waited for.
        what: &'static str,
        /// For how long.
        timeout: Duration,
    },
    /// Two ends run different versions of the program.
    #[error(
        "{address} runs version {theirs}, this end runs {ours}\nhint: install the same version on both"
    )]
    Version {
        /// The other end.
        address: SocketAddr,
        /// The version of this end.
        ours: String,
        /// The version of the other.
        theirs: String,
    },
    /// The other end does not want to, and says why.
    #[error("{address} refused: {reason}")]
    Refused {
        /// The other end.
        address: SocketAddr,
        /// Why.
        reason: String,
    },
    /// What was asked for makes no sense.
    #[error("{reason}")]
    Request {
        /// Why not.
        reason: String,
    },
    /// A fault of the group.
    #[error(transparent)]
    Group(#[from] FabricError),
}
