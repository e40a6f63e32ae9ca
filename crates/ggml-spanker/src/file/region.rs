// SPDX-License-Identifier: Apache-2.0
//! Several files one after the other in memory, each from the beginning of a page, so that whoever computes with the bytes
//! of a model need not know that it came in parts. On Unix they are mapped; elsewhere they are read.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;

/// Address space for files, and the files that are mapped there.
#[derive(Debug)]
pub(super) struct Region {
    memory: Memory,
    /// Where each file is, without the rest of its last page.
    places: Vec<Range<usize>>,
}

impl Region {
    /// Space for files of these lengths.
    pub(super) fn new(lengths: &[u64]) -> io::Result<Region> {
        let page = page();
        let mut places = Vec::with_capacity(lengths.len());
        let mut end = 0_usize;
        for &length in lengths {
            let place = usize::try_from(length).ok().and_then(|length| {
                let start = end;
                end = start.checked_add(length.checked_next_multiple_of(page)?)?;
                Some(start..start + length)
            });
            places.push(place.ok_or(io::ErrorKind::OutOfMemory)?);
        }
        Ok(Region { memory: Memory::new(end)?, places })
    }

    /// Brings a file to its place. It must have the length that it was announced with.
    pub(super) fn fill(&mut self, at: usize, file: &File) -> io::Result<()> {
        let place = self.places[at].clone();
        if file.metadata()?.len() != place.len() as u64 {
            return Err(io::Error::other("its length has changed"));
        }
        if place.is_empty() {
            return Ok(());
        }
        self.memory.fill(place, file)
    }

    /// Where a file begins.
    pub(super) fn start(&self, at: usize) -> u64 {
        self.places[at].start as u64
    }

    /// The bytes of a file.
    pub(super) fn part(&self, at: usize) -> &[u8] {
        &self.bytes()[self.places[at].clone()]
    }

    /// All bytes up to the last file's end, with zeros between files and where no file is yet.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory.bytes()[..self.places.last().map_or(0, |place| place.end)]
    }
}

#[cfg(unix)]
fn page() -> usize {
    // SAFETY: only asks for a number.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096).max(1)
}

#[cfg(not(unix))]
fn page() -> usize {
    4096
}

/// Address space that files are mapped over.
#[cfg(unix)]
#[derive(Debug)]
struct Memory {
    start: std::ptr::NonNull<u8>,
    length: usize,
}

// SAFETY: the memory belongs to this value alone, and what is shared of it is only read.
#[cfg(unix)]
unsafe impl Send for Memory {}
// SAFETY: as above; nothing is mapped over a part of it without the only reference to it.
#[cfg(unix)]
unsafe impl Sync for Memory {}

#[cfg(unix)]
impl Memory {
    fn new(length: usize) -> io::Result<Memory> {
        // Nothing can be mapped with a length of 0.
        let length = length.max(1);
        // SAFETY: asks for new address space, which nothing else uses, and takes no memory.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = std::ptr::NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Memory { start, length })
    }

    fn fill(&mut self, place: Range<usize>, file: &File) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        assert!(place.end <= self.length, "a file of {place:?} in {} bytes", self.length);
        // SAFETY: the place is within this value's address space and begins at a page; nobody holds a reference to it
        // while it is changed. That nobody else changes the file meanwhile cannot be known, as with every mapping.
        let mapped = unsafe {
            libc::mmap(
                self.start.as_ptr().add(place.start).cast(),
                place.len(),
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_FIXED,
                file.as_raw_fd(),
                0,
            )
        };
        match mapped == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(()),
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the whole range is mapped and can be read as long as this value lives.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

#[cfg(unix)]
impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own, with all that is mapped there, and nobody holds a reference to it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

#[cfg(not(unix))]
#[derive(Debug)]
struct Memory(memmap2::MmapMut);

#[cfg(not(unix))]
impl Memory {
    fn new(length: usize) -> io::Result<Memory> {
        Ok(Memory(memmap2::MmapMut::map_anon(length.max(1))?))
    }

    fn fill(&mut self, place: Range<usize>, mut file: &File) -> io::Result<()> {
        io::Read::read_exact(&mut file, &mut self.0[place])
    }

    fn bytes(&self) -> &[u8] {
        &self.0
    }
}
