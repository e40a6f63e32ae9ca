// SPDX-License-Identifier: Apache-2.0
//! A reader that knows its place, and its bounds before it reads.

use std::io::{self, BufRead, BufReader, Read, Take};

use crate::ModelError;

/// The most bytes that a header may have.
const MAX_HEADER: u64 = 256 << 20;
/// The most bytes of text that are kept of a header.
const MAX_KEPT: u64 = 16 << 20;
/// Bytes that are read at once.
const BUFFER: usize = 64 << 10;

/// The beginning of a file, read in order.
pub(super) struct Cursor<R> {
    reader: BufReader<Take<R>>,
    at: u64,
    kept: u64,
    file_bytes: u64,
}

impl<R: Read> Cursor<R> {
    pub(super) fn new(reader: R, file_bytes: u64) -> Self {
        let reader = reader.take(file_bytes.min(MAX_HEADER));
        Cursor { reader: BufReader::with_capacity(BUFFER, reader), at: 0, kept: 0, file_bytes }
    }

    /// The byte of the file that is read next.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Checks that `bytes` more can follow. `what` is what they are, for the error.
    pub(super) fn check(&self, bytes: u64, what: &str) -> Result<(), ModelError> {
        if bytes > self.file_bytes - self.at {
            return Err(self.ends(self.file_bytes, what));
        }
        if bytes > MAX_HEADER.saturating_sub(self.at) {
            let reason = format!("{what} of {bytes} bytes: a header has at most {MAX_HEADER}");
            return Err(ModelError::gguf(self.at, reason));
        }
        Ok(())
    }

    fn ends(&self, end: u64, what: &str) -> ModelError {
        ModelError::gguf(self.at, format!("the file ends at byte {end}, in {what}"))
    }

    fn failed(&self, error: &io::Error, what: &str) -> ModelError {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            let reason = format!("the file ends before byte {}, in {what}", self.file_bytes);
            return ModelError::gguf(self.at, reason);
        }
        ModelError::Read { offset: self.at, kind: error.kind(), reason: error.to_string() }
    }

    /// The next `N` bytes.
    pub(super) fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ModelError> {
        self.check(N as u64, what)?;
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes).map_err(|error| self.failed(&error, what))?;
        self.at += N as u64;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, ModelError> {
        self.bytes(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, ModelError> {
        self.bytes(what).map(u64::from_le_bytes)
    }

    /// Reads past `bytes` bytes.
    pub(super) fn skip(&mut self, bytes: u64, what: &str) -> Result<(), ModelError> {
        self.check(bytes, what)?;
        // Most skips are a token's few bytes, which are in the buffer.
        let buffered = bytes.min(self.reader.buffer().len() as u64);
        self.reader.consume(buffered as usize);
        let rest = bytes - buffered;
        if rest > 0 {
            let copied = io::copy(&mut self.reader.by_ref().take(rest), &mut io::sink());
            if copied.map_err(|error| self.failed(&error, what))? < rest {
                return Err(self.failed(&io::ErrorKind::UnexpectedEof.into(), what));
            }
        }
        self.at += bytes;
        Ok(())
    }

    /// The next `bytes` bytes, to be kept. The caller has bounded the number; their sum is bounded
    /// here.
    pub(super) fn keep(&mut self, bytes: u64, what: &str) -> Result<Vec<u8>, ModelError> {
        self.check(bytes, what)?;
        if self.kept + bytes > MAX_KEPT {
            let reason = format!("{what} of {bytes} bytes: more than {MAX_KEPT} bytes of text");
            return Err(ModelError::gguf(self.at, reason));
        }
        let mut kept = vec![0; bytes as usize];
        self.reader.read_exact(&mut kept).map_err(|error| self.failed(&error, what))?;
        self.at += bytes;
        self.kept += bytes;
        Ok(kept)
    }

    /// A name of 1 to `max` bytes: its length, then UTF-8.
    pub(super) fn name(&mut self, max: u64, what: &str) -> Result<String, ModelError> {
        let at = self.at;
        let bytes = self.u64(what)?;
        if bytes == 0 || bytes > max {
            let reason = format!("{what} of {bytes} bytes: it has 1 to {max}");
            return Err(ModelError::gguf(at, reason));
        }
        String::from_utf8(self.keep(bytes, what)?)
            .map_err(|_| ModelError::gguf(at, format!("{what} is not UTF-8")))
    }
}
