// SPDX-License-Identifier: Apache-2.0
//! Models by content: the SHA-256 of every chunk of a file, and one number of all of them, by which machines agree on a
//! model whatever its file is called and wherever it lies.
//!
//! Hashing a file takes about as long as reading it, so what came of it is kept in the user's cache, for the file's
//! path, length, place in its file system and time of change.

pub(crate) mod cache;

use std::fmt::Write;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};
use spanker_llm::{chunk_count, chunk_range, fingerprint};

use crate::profiles::cache_folder;

/// The longest file that is named by content: its hashes are 64 MiB.
const MOST_LENGTH: u64 = 1 << 41;
/// Manifests that are kept.
const MOST_KEPT: usize = 32;
/// Bytes of a hash.
const HASH: usize = 32;

type Hash = [u8; HASH];

/// What a model's bytes are, chunk by chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Manifest {
    length: u64,
    chunks: Vec<Hash>,
}

impl Manifest {
    /// The manifest of these bytes.
    pub(crate) fn of(bytes: &[u8]) -> Manifest {
        let length = bytes.len() as u64;
        let count = chunk_count(length) as usize;
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        let mut chunks = vec![Hash::default(); count];
        let each = count.div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (part, own) in chunks.chunks_mut(each).enumerate() {
                scope.spawn(move || {
                    for (at, hash) in own.iter_mut().enumerate() {
                        let range = chunk_range(length, (part * each + at) as u64);
                        *hash = sha256(&bytes[range.start as usize..range.end as usize]);
                    }
                });
            }
        });
        Manifest { length, chunks }
    }

    /// The manifest of a file whose bytes these are, from the cache if it was made before.
    pub(crate) fn of_file(path: &Path, bytes: &[u8]) -> Manifest {
        let kept = key(path, bytes.len() as u64).zip(cache_folder());
        let Some((key, folder)) = kept else { return Manifest::of(bytes) };
        let folder = folder.join("manifests");
        let file = folder.join(format!("{:016x}", fingerprint(key.bytes())));
        if let Some(manifest) = fs::read(&file).ok().and_then(|kept| unkept(&key, &kept)) {
            return manifest;
        }
        let manifest = Manifest::of(bytes);
        // Whoever cannot keep it makes it again next time.
        let _ = fs::create_dir_all(&folder);
        let head = format!("{key}\n{}\n", manifest.length);
        let _ = crate::files::write(&file, [head.as_bytes(), &manifest.to_bytes()].concat());
        forget_oldest(&folder);
        manifest
    }

    /// Bytes of the model.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// The number of the whole, as 64 hexadecimal digits.
    pub(crate) fn id(&self) -> String {
        let mut all = Sha256::new();
        all.update(b"spanker chunks 1");
        all.update(self.length.to_le_bytes());
        all.update(self.chunks.as_flattened());
        all.finalize().iter().fold(String::new(), |mut text, byte| {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    /// All hashes, one after the other.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.chunks.as_flattened().to_vec()
    }

    /// The manifest of a model of this length and number, if these are its hashes.
    pub(crate) fn from_bytes(length: u64, id: &str, bytes: &[u8]) -> Option<Manifest> {
        let manifest = read(length, bytes)?;
        (manifest.id() == id).then_some(manifest)
    }

    /// Whether these bytes are this chunk.
    pub(crate) fn is_chunk(&self, number: u64, bytes: &[u8]) -> bool {
        let known = usize::try_from(number).ok().and_then(|number| self.chunks.get(number));
        known.is_some_and(|hash| *hash == sha256(bytes))
    }
}

fn sha256(bytes: &[u8]) -> Hash {
    Sha256::digest(bytes).into()
}

/// Bytes of the manifest of a file of this length; nothing for one that is too long.
pub(crate) fn manifest_bytes(length: u64) -> Option<u64> {
    (length <= MOST_LENGTH).then(|| chunk_count(length) * HASH as u64)
}

fn read(length: u64, bytes: &[u8]) -> Option<Manifest> {
    let expected = manifest_bytes(length)?;
    let (chunks, odd) = bytes.as_chunks();
    (odd.is_empty() && bytes.len() as u64 == expected)
        .then(|| Manifest { length, chunks: chunks.to_vec() })
}

/// All that a file's manifest is kept for, in a line.
fn key(path: &Path, length: u64) -> Option<String> {
    let path = fs::canonicalize(path).ok()?;
    let file = fs::metadata(&path).ok()?;
    let changed = file.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
    // A file that was put in another's place may have its length and times.
    let place = [file.dev(), file.ino()];
    Some(format!("{:?} {length} {changed} {place:?}", path.as_os_str()))
}

/// What was kept for a key.
fn unkept(key: &str, kept: &[u8]) -> Option<Manifest> {
    let rest = kept.strip_prefix(key.as_bytes())?.strip_prefix(b"\n")?;
    let end = rest.iter().position(|&byte| byte == b'\n')?;
    let length = std::str::from_utf8(&rest[..end]).ok()?.parse().ok()?;
    read(length, &rest[end + 1..])
}

/// Removes what is one too many: manifests of files that are no more would never be read again.
fn forget_oldest(folder: &Path) {
    let Ok(entries) = folder.read_dir() else { return };
    let written =
        |entry: fs::DirEntry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()));
    let mut files: Vec<_> = entries.flatten().filter_map(written).collect();
    files.sort_unstable();
    for (_, path) in files.iter().take(files.len().saturating_sub(MOST_KEPT)) {
        // Another process may have done so.
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(length: usize) -> Vec<u8> {
        (0..length).map(|at| ((at * 7) >> 3) as u8 ^ (at >> 20) as u8).collect()
    }

    #[test]
    fn number_depends_on_every_byte_and_on_the_length_and_on_nothing_else() {
        let bytes = bytes(3 << 20);
        let id = Manifest::of(&bytes).id();
        assert_eq!((id.len(), Manifest::of(&bytes.clone()).id()), (64, id.clone()));
        for at in [0, (1 << 20) - 1, 1 << 20, (3 << 20) - 1] {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_ne!(Manifest::of(&other).id(), id, "byte {at}");
        }
        assert_ne!(Manifest::of(&bytes[..bytes.len() - 1]).id(), id);
    }

    #[test]
    fn manifest_as_bytes_is_read_for_its_length_and_number_alone() {
        let manifest = Manifest::of(&bytes((2 << 20) + 5));
        let (length, id, hashes) = (manifest.length(), manifest.id(), manifest.to_bytes());
        assert_eq!(hashes.len(), 96);
        assert_eq!(Manifest::from_bytes(length, &id, &hashes), Some(manifest.clone()));
        assert_eq!(Manifest::from_bytes(length + 1, &id, &hashes), None);
        assert_eq!(Manifest::from_bytes(length, &id, &hashes[..64]), None);
        assert_eq!(Manifest::from_bytes(u64::MAX, &id, &hashes), None);
        let mut other = hashes.clone();
        other[40] ^= 1;
        assert_eq!(Manifest::from_bytes(length, &id, &other), None);
    }

    #[test]
    fn chunk_with_one_wrong_byte_is_another() {
        let bytes = bytes((2 << 20) + 5);
        let manifest = Manifest::of(&bytes);
        assert!(manifest.is_chunk(0, &bytes[..1 << 20]) && manifest.is_chunk(2, &bytes[2 << 20..]));
        let mut other = bytes[..1 << 20].to_vec();
        other[77] ^= 0x80;
        assert!(!manifest.is_chunk(0, &other) && !manifest.is_chunk(1, &bytes[..1 << 20]));
        assert!(!manifest.is_chunk(3, &[]));
    }

    #[test]
    fn file_in_the_place_of_another_is_another_even_with_its_length_and_time() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("x.gguf"), folder.path().join("y.gguf"));
        for file in [&path, &other] {
            fs::write(file, "same length").unwrap();
            let file = fs::File::options().write(true).open(file).unwrap();
            file.set_modified(UNIX_EPOCH + std::time::Duration::from_secs(1)).unwrap();
        }
        let before = key(&path, 11);
        assert_eq!(key(&path, 11), before);
        fs::rename(&other, &path).unwrap();
        assert!(before.is_some() && key(&path, 11) != before);
    }

    #[test]
    fn what_is_kept_is_for_one_path_length_and_time() {
        let manifest = Manifest::of(&bytes(1000));
        let kept = [b"a 1000 5\n1000\n", &manifest.to_bytes()[..]].concat();
        assert_eq!(unkept("a 1000 5", &kept), Some(manifest));
        assert_eq!(unkept("a 1000 6", &kept), None);
        assert_eq!(unkept("a 1000 5", &kept[..kept.len() - 1]), None);
    }
}
