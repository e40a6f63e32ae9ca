// SPDX-License-Identifier: Apache-2.0
//! What a link between two cards is made of: memory that both map, and a bell to wake each other. Neither has a
//! name, so nothing of them outlives the cards; the bell also shows that a card is gone.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::card::Wire;
use crate::shared::{Rings, create};

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
    let memory = create()?;
    let copy = memory.try_clone()?;
    Ok([LinkEnd { bell: here.into(), memory }, LinkEnd { bell: there.into(), memory: copy }])
}

/// An end in use.
#[derive(Debug)]
pub(crate) struct Cable {
    rings: Rings,
    bell: UnixStream,
}

impl Cable {
    pub(crate) fn new(end: LinkEnd, side: bool) -> io::Result<Cable> {
        let bell = UnixStream::from(end.bell);
        bell.set_nonblocking(true)?;
        let rings = Rings::map(&end.memory, side)?;
        Ok(Cable { rings, bell })
    }

    /// Passes the next frame, its stamp and its bytes, to `see`. Returns whether there was one.
    pub(crate) fn next(&mut self, see: &mut dyn FnMut(u64, &[u8])) -> io::Result<bool> {
        self.rings.next(see)
    }

    /// Wakes the peer if it waits for something that has happened.
    pub(crate) fn ring(&mut self) {
        if self.rings.peer_waits() {
            // A full bell rings already; a dead peer is seen when the bell is read.
            let _ = self.bell.write(&[1]);
        }
    }

    /// Whether to sleep: false if there is something to read after all.
    pub(crate) fn sleep(&self) -> bool {
        self.rings.set_asleep(true);
        if self.rings.is_empty() {
            return true;
        }
        self.rings.set_asleep(false);
        false
    }

    pub(crate) fn wake(&self) {
        self.rings.set_asleep(false);
    }

    /// Empties the bell. False if the peer is gone.
    pub(crate) fn answer_bell(&mut self) -> bool {
        let mut rung = [0; 64];
        loop {
            match self.bell.read(&mut rung) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
    }

    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Wire for Cable {
    fn has_space(&self) -> bool {
        let has_space = self.rings.has_space();
        if !has_space {
            self.rings.set_full(true);
        }
        // The peer may have freed space before it could see that someone waits for it.
        has_space || self.rings.has_space()
    }

    fn put(&mut self, stamp: u64, parts: &[&[u8]]) {
        self.rings.put(stamp, parts);
    }
}
