// SPDX-License-Identifier: Apache-2.0
//! GGUF files mapped into memory, so that weights are read where they lie, and models in several files as if they were one.
//! Nothing is decoded or written here.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use spanker_model::Quant;
use spanker_model::gguf::{Header, Parts, Tensor};

#[cfg(unix)]
use crate::bus::Watched;
use crate::error::{Error, Result};
use region::Region;

mod region;

/// A GGUF file whose header has been checked and whose weights are mapped.
///
/// The file must stay as it is while it is mapped. If it is cut short, the next look at a page that is gone ends
/// the process with exit code 1 and an error that names the file, because there is nothing to return an error to; if it
/// is written to, weights change. Whoever replaces a model writes a new file
/// and renames it: the mapping keeps the old one.
///
/// A model in parts, `NAME-00001-of-00003.gguf` and so on, is opened by any of them. The parts follow each other in
/// [`bytes`](GgufFile::bytes), each from the beginning of a page; the metadata are those of the first.
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
    _watched: Vec<Watched>,
    bytes: Bytes,
    header: Header,
}

/// Where the bytes of a model are.
#[derive(Debug)]
enum Bytes {
    File(Mmap),
    Parts(Region),
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
    /// Where it begins in [`GgufFile::bytes`].
    pub offset: u64,
}

impl AsRef<[u8]> for GgufFile {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl GgufFile {
    /// Maps a file, or all parts of a model of which it is one, and checks its header, and that every tensor lies within
    /// the file.
    ///
    /// # Errors
    /// [`Error::File`] if it or another part cannot be opened or mapped or is not a regular file, [`Error::Model`] if it
    /// is not a sound GGUF file, or parts do not belong together.
    pub fn open(path: impl AsRef<Path>) -> Result<GgufFile> {
        let path = path.as_ref();
        let file = regular(path, "open")?;
        // SAFETY: the mapping is only ever read. That nobody else changes the file meanwhile cannot be
        // known; the documentation of the type says what happens then.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| failed(path, "map", &error))?;
        #[cfg(unix)]
        let watched = vec![Watched::new(&map, path)];
        let header = Header::read(&map[..], map.len() as u64)?;
        let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        let opened = match Parts::of(&name, &header)? {
            Some(parts) => GgufFile::parts(path, parts)?,
            None => GgufFile {
                #[cfg(unix)]
                _watched: watched,
                bytes: Bytes::File(map),
                header,
            },
        };
        for (name, tensor) in opened.header.tensors() {
            if opened.range(tensor).is_none() {
                return Err(Error::Range { name: name.escape_debug().to_string() });
            }
        }
        Ok(opened)
    }

    /// Maps all parts of the model of which `path` is one.
    fn parts(path: &Path, mut parts: Parts) -> Result<GgufFile> {
        let paths: Vec<PathBuf> = parts.names().map(|name| path.with_file_name(name)).collect();
        let files = paths.iter().enumerate().map(|(at, path)| {
            let op = format!("open part {} of {}", at + 1, paths.len());
            Ok(regular(path, &op)?.metadata().map_err(|error| failed(path, &op, &error))?.len())
        });
        let lengths: Vec<u64> = files.collect::<Result<_>>()?;
        let mut region = Region::new(&lengths).map_err(|error| failed(path, "map", &error))?;
        #[cfg(unix)]
        let mut watched = Vec::new();
        for (at, path) in paths.iter().enumerate() {
            let op = format!("map part {} of {}", at + 1, paths.len());
            let file = regular(path, &op)?;
            region.fill(at, &file).map_err(|error| failed(path, &op, &error))?;
            let part = region.part(at);
            #[cfg(unix)]
            watched.push(Watched::new(part, path));
            let header = Header::read(part, lengths[at]);
            let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
            let header = header.map_err(|error| Error::Part {
                name: name.escape_debug().to_string(),
                source: error,
            })?;
            parts.add(&name, header, region.start(at))?;
        }
        Ok(GgufFile {
            #[cfg(unix)]
            _watched: watched,
            bytes: Bytes::Parts(region),
            header: parts.finish()?,
        })
    }

    /// What the file says before its weights begin.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The whole file, or all parts of the model, with zeros between them.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::File(map) => map,
            Bytes::Parts(region) => region.bytes(),
        }
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
        let bytes = self.bytes().get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)?;
        Some((start, bytes))
    }
}

/// What the system says of a file.
fn failed(path: &Path, op: &str, error: &io::Error) -> Error {
    let (path, reason) = (path.display().to_string(), error.to_string());
    Error::File { path, op: op.to_owned(), reason }
}

/// Opens a regular file.
fn regular(path: &Path, op: &str) -> Result<File> {
    // Looked at before it is opened: opening a pipe would wait for its other end.
    let about = std::fs::metadata(path).map_err(|error| failed(path, op, &error))?;
    if !about.is_file() {
        return Err(failed(path, op, &io::Error::other("not a regular file")));
    }
    File::open(path).map_err(|error| failed(path, op, &error))
}
