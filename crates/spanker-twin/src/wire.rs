// SPDX-License-Identifier: Apache-2.0
//! What a link between two cards is made of: memory that both map, and a bell to wake each other.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::fs::MemfdFlags;

/// One end of a link.
#[derive(Debug)]
pub struct LinkEnd {
    /// A socket whose other end the peer has.
    pub bell: OwnedFd,
    /// Memory that both ends map.
    pub memory: OwnedFd,
}

/// Both ends of a link.
///
/// # Errors
/// The system has no more descriptors or memory.
pub fn link_pair() -> io::Result<[LinkEnd; 2]> {
    let (here, there) = UnixStream::pair()?;
    let memory = rustix::fs::memfd_create("spanker-link", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&memory, 1 << 16)?;
    let copy = memory.try_clone()?;
    Ok([LinkEnd { bell: here.into(), memory }, LinkEnd { bell: there.into(), memory: copy }])
}
