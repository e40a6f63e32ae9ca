// SPDX-License-Identifier: Apache-2.0
//! GGUF files mapped into memory, so that weights are read where they lie. Nothing is copied, decoded or
//! written here.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;
use spanker_model::Quant;
use spanker_model::gguf::{Header, Tensor};

#[cfg(unix)]
use crate::bus::Watched;
use crate::error::{Error, Result};

/// A GGUF file whose header has been checked and whose weights are mapped.
///
/// The file must stay as it is while it is mapped. If it is cut short, the next look at a page that is gone ends
/// the process with exit code 1 and an error that names the file, because there is nothing to return an error to; if it
/// is written to, weights change. Whoever replaces a model writes a new file
/// and renames it: the mapping keeps the old one.
///
/// ```
/// use ggml_spanker::GgufFile;
/// let path = std::env::temp_dir().join(format!("ggml-spanker-{}.gguf", std::process::id()));
/// let mut file = b"GGUF\x03\0\0\0".to_vec();
/// file.extend([0; 16]);
/// std::fs::write(&path, file)?;
/// let file = GgufFile::open(&path)?;
/// assert_eq!((file.header().version(), file.bytes().len()), (3, 24));
/// assert!(file.tensor("output.weight").is_none());
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GgufFile {
    /// Before the mapping, so that it is dropped first.
    #[cfg(unix)]
    _watched: Watched,
    map: Mmap,
    header: Header,
}

/// One tensor in the mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorView<'a> {
    /// How it is stored.
    pub quant: Quant,
    /// Sizes, innermost first: for a matrix its columns, then its rows.
    pub dims: &'a [u64],
    /// Its blocks.
    pub bytes: &'a [u8],
    /// The byte of the file at which it begins.
    pub offset: u64,
}

impl AsRef<[u8]> for GgufFile {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl GgufFile {
    /// Maps a file and checks its header, and that every tensor lies within the file.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be opened or mapped or is not a regular file, [`Error::Model`] if it is not a
    /// sound GGUF file.
    pub fn open(path: impl AsRef<Path>) -> Result<GgufFile> {
        let path = path.as_ref();
        let failed = |op: &'static str| {
            move |error: io::Error| Error::File {
                path: path.display().to_string(),
                op,
                reason: error.to_string(),
            }
        };
        // Looked at before it is opened: opening a pipe would wait for its other end.
        let is_file = std::fs::metadata(path).map_err(failed("open"))?.is_file();
        if !is_file {
            return Err(failed("open")(io::Error::other("not a regular file")));
        }
        let file = File::open(path).map_err(failed("open"))?;
        // SAFETY: the mapping is only ever read. That nobody else changes the file meanwhile cannot be
        // known; the documentation of the type says what happens then.
        let map = unsafe { Mmap::map(&file) }.map_err(failed("map"))?;
        #[cfg(unix)]
        let watched = Watched::new(&map, path);
        let header = Header::read(&map[..], map.len() as u64)?;
        let opened = GgufFile {
            #[cfg(unix)]
            _watched: watched,
            map,
            header,
        };
        for (name, tensor) in opened.header.tensors() {
            if opened.range(tensor).is_none() {
                return Err(Error::Range { name: name.escape_debug().to_string() });
            }
        }
        Ok(opened)
    }

    /// What the file says before its weights begin.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The whole file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The tensor of this name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let tensor = self.header.tensors().get(name)?;
        let (offset, bytes) = self.range(tensor)?;
        Some(TensorView { quant: tensor.quant, dims: &tensor.dims, bytes, offset })
    }

    /// Where a tensor begins, and its bytes, if they are within the file.
    fn range(&self, tensor: &Tensor) -> Option<(u64, &[u8])> {
        let start = self.header.data_offset().checked_add(tensor.offset)?;
        let end = start.checked_add(tensor.bytes)?;
        let bytes = self.map.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)?;
        Some((start, bytes))
    }
}
