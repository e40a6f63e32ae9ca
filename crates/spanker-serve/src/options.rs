// SPDX-License-Identifier: Apache-2.0
//! How a server listens, whom it answers, and what it bounds.

use std::path::PathBuf;
use std::time::Duration;

/// How a server listens, and whom it answers.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The address to listen at, or a name of one.
    pub host: String,
    /// The port; 0 takes one that is free.
    pub port: u16,
    /// Keys of which a request must have one; none asks for none, which is for loopback addresses alone.
    pub keys: Vec<String>,
    /// The origins whose pages may read answers, as browsers name them; `*` for every one.
    pub origins: Vec<String>,
    /// The certificate and the key of TLS; nothing for plain HTTP.
    pub tls: Option<TlsFiles>,
    /// What the model is called.
    pub name: String,
    /// Other names by which it can be asked for.
    pub other_names: Vec<String>,
    /// How long answers that are under way may take once the server is ending.
    pub drain: Duration,
    /// What a client may take.
    pub limits: HttpLimits,
}

/// Files in PEM.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The certificate, with those that vouch for it.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// What a client may take.
#[derive(Debug, Clone, Copy)]
pub struct HttpLimits {
    /// Bytes of a body.
    pub body: usize,
    /// Bytes of all bodies that are being read.
    pub bodies: usize,
    /// How long the head of a request may take, from when the connection is idle.
    pub head: Duration,
    /// How long its body may take.
    pub body_time: Duration,
    /// How long a client may not read what is sent to it.
    pub unread: Duration,
    /// Pieces of an answer that are kept for a client that does not read.
    pub pieces: usize,
    /// Connections.
    pub connections: usize,
}

impl HttpLimits {
    /// What is usual.
    #[must_use]
    pub const fn usual() -> HttpLimits {
        HttpLimits {
            body: 8 << 20,
            bodies: 64 << 20,
            head: Duration::from_secs(30),
            body_time: Duration::from_secs(60),
            unread: Duration::from_secs(60),
            pieces: 4096,
            connections: 512,
        }
    }
}

/// Why a server cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// An address that nobody can listen at.
    #[error("cannot listen at {host}:{port}: {error}")]
    Listen {
        /// The address or its name.
        host: String,
        /// The port.
        port: u16,
        /// Why not.
        error: std::io::Error,
    },
    /// An address that others can reach, without a key.
    #[error("{host} can be reached from other machines, and no API key is set")]
    Open {
        /// The address or its name.
        host: String,
    },
    /// An option that makes no sense.
    #[error("{what}")]
    Option {
        /// What is wrong, with the value.
        what: String,
    },
    /// A certificate or a key that cannot be used.
    #[error("{}: {what}", path.display())]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The system does not give what the server needs.
    #[error("cannot {doing}: {error}")]
    System {
        /// What could not be done.
        doing: &'static str,
        /// Why not.
        error: std::io::Error,
    },
}
