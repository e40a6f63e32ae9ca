// SPDX-License-Identifier: Apache-2.0
//! Compiled kernels in a folder, so that the next process need not compile them again. Whatever is not exactly what was
//! asked for is no kernel: another source, compiler or processor, a file that ends early or has changed.
//!
//! Not here: compiling, and loading code onto a processor.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::compile::Image;

/// The first bytes of a file.
const MAGIC: &[u8; 16] = b"spanker-kernel 1";
/// The length of what comes before key and code: the magic, the kind, two lengths and a checksum.
const HEAD: usize = 16 + 8 * 4;
/// Files that are kept; of more, the oldest go.
const MOST_FILES: usize = 64;
/// More than any kernel has.
const MOST_BYTES: u64 = 64 << 20;

fn sum(parts: &[&[u8]]) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}

/// Where a kernel is kept. `key` has all that its code depends on.
fn path(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{:016x}.kernel", sum(&[key.as_bytes()])))
}

/// The kernel of a key, if it is there and as it was written.
pub(crate) fn read(folder: &Path, key: &str) -> Option<Image> {
    let path = path(folder, key);
    if fs::metadata(&path).ok()?.len() > MOST_BYTES {
        return None;
    }
    parse(&fs::read(path).ok()?, key)
}

fn parse(bytes: &[u8], key: &str) -> Option<Image> {
    let (head, rest) = bytes.split_at_checked(HEAD)?;
    let (magic, numbers) = head.split_at(MAGIC.len());
    let number = |at: usize| {
        let bytes = numbers[8 * at..8 * at + 8].try_into().unwrap_or_default();
        u64::from_le_bytes(bytes)
    };
    let (kind, key_bytes, code_bytes, checksum) = (number(0), number(1), number(2), number(3));
    let (found, code) = rest.split_at_checked(usize::try_from(key_bytes).ok()?)?;
    let whole = magic == MAGIC && found == key.as_bytes() && code.len() as u64 == code_bytes;
    if !whole || sum(&[found, code]) != checksum {
        return None;
    }
    match kind {
        0 => Some(Image::Machine(code.to_vec())),
        1 => Some(Image::Portable(String::from_utf8(code.to_vec()).ok()?)),
        _ => None,
    }
}

/// Keeps a kernel. A folder that cannot be written to costs time later, and nothing else.
pub(crate) fn write(folder: &Path, key: &str, image: &Image) {
    let (kind, code): (u64, &[u8]) = match image {
        Image::Machine(code) => (0, code),
        Image::Portable(code) => (1, code.as_bytes()),
    };
    let checksum = sum(&[key.as_bytes(), code]);
    let mut bytes = MAGIC.to_vec();
    for number in [kind, key.len() as u64, code.len() as u64, checksum] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(key.as_bytes());
    bytes.extend_from_slice(code);
    let path = path(folder, key);
    // Another process may read or write the same kernel: it appears as a whole, or not at all.
    let unfinished = path.with_extension(format!("{}.part", std::process::id()));
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(&unfinished, bytes));
    if written.and_then(|()| fs::rename(&unfinished, &path)).is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    prune(folder);
}

/// Removes the oldest kernels where there are too many.
fn prune(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let age = |entry: fs::DirEntry| {
        let written = entry.metadata().and_then(|data| data.modified());
        (written.unwrap_or(SystemTime::UNIX_EPOCH), entry.path())
    };
    let mut files: Vec<(SystemTime, PathBuf)> = entries.flatten().map(age).collect();
    files.sort();
    for (_, path) in files.iter().rev().skip(MOST_FILES) {
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("spanker-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn kernel_is_found_again_by_its_key_and_by_no_other() {
        let folder = scratch("kept");
        assert_eq!(read(&folder, "a"), None);
        let images = [Image::Machine(vec![1, 2, 3]), Image::Portable(".target".into())];
        for (key, image) in ["a", "b"].into_iter().zip(&images) {
            write(&folder, key, image);
            assert_eq!(read(&folder, key).as_ref(), Some(image), "{key}");
        }
        assert_eq!(read(&folder, "c"), None);
        // A file under the name of another key.
        fs::copy(path(&folder, "a"), path(&folder, "c")).expect("copied");
        assert_eq!(read(&folder, "c"), None);
        fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn file_that_ends_early_or_has_changed_is_no_kernel() {
        let folder = scratch("changed");
        write(&folder, "key", &Image::Machine((0..100).collect()));
        let whole = fs::read(path(&folder, "key")).expect("written");
        assert!(parse(&whole, "key").is_some());
        for length in 0..whole.len() {
            assert_eq!(parse(&whole[..length], "key"), None, "{length} bytes");
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0x10;
            assert_eq!(parse(&changed, "key"), None, "byte {at}");
        }
        let longer = [&whole[..], b"x"].concat();
        assert_eq!(parse(&longer, "key"), None);
        fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn oldest_kernels_go_where_there_are_too_many_and_no_folder_is_no_error() {
        let folder = scratch("many");
        for number in 0..MOST_FILES + 5 {
            write(&folder, &number.to_string(), &Image::Machine(vec![7]));
        }
        assert_eq!(fs::read_dir(&folder).expect("there").count(), MOST_FILES);
        fs::remove_dir_all(&folder).expect("removed");
        write(Path::new("/proc/nothing"), "key", &Image::Machine(vec![7]));
    }
}
