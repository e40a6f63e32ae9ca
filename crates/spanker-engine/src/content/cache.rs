// SPDX-License-Identifier: Apache-2.0
//! Parts of models that a worker got over the network, kept for the next time: for each model a sparse file with its
//! bytes where the whole file has them, and which chunks are there.
//!
//! A chunk counts as there once it is on the disk. That is waited for on a thread: whoever gets chunks goes on with the
//! next ones, and with its work when it has them all. Several workers of one machine may share a cache: they write the same
//! bytes to the same places. What was used longest ago goes when the cache is full, unless somebody uses it.

use std::cell::{Cell, RefCell};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::SystemTime;

use rustix::fs::{FlockOperation, flock};
use spanker_llm::{CHUNK_BYTES, Store, chunk_count, chunk_range};

use super::Manifest;

/// Chunks that are written before somebody makes them safe and marks them.
const BATCH: usize = 16;
/// So many times as many may wait for the disk, which may be slower than the network: who has written all waits for it.
const AHEAD: usize = 2;
const THERE: u8 = 1;

/// A folder of models.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    pub(crate) folder: PathBuf,
    /// Bytes of all models together at most.
    pub(crate) limit: u64,
}

/// What a cache has of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) id: String,
    /// What the leader called it.
    pub(crate) name: String,
    pub(crate) length: u64,
    /// Bytes that are there.
    pub(crate) held: u64,
    used: SystemTime,
}

fn words(path: &Path) -> impl Fn(io::Error) -> String {
    move |error| format!("{}: {error}", path.display())
}

/// Whether a text is the number of a manifest, and so can be the name of a folder.
pub(crate) fn is_id(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl Cache {
    fn place(&self, id: &str) -> PathBuf {
        self.folder.join(id)
    }

    /// The manifest of a model of which the cache has something.
    pub(crate) fn manifest(&self, id: &str, length: u64) -> Option<Manifest> {
        Manifest::from_bytes(length, id, &fs::read(self.place(id).join("manifest")).ok()?)
    }

    /// Everything that is there, what was used last first.
    pub(crate) fn entries(&self) -> Vec<Entry> {
        let Ok(folders) = self.folder.read_dir() else { return Vec::new() };
        let entry = |folder: fs::DirEntry| {
            let id = folder.file_name().into_string().ok().filter(|name| is_id(name))?;
            let path = folder.path();
            let length = fs::metadata(path.join("model.gguf")).ok()?.len();
            let marks = fs::read(path.join("present")).ok()?;
            let used = fs::metadata(path.join("used")).and_then(|file| file.modified()).ok()?;
            let name = fs::read_to_string(path.join("name")).unwrap_or_default();
            Some(Entry { id, name, length, held: held(length, &marks), used })
        };
        let mut list: Vec<Entry> = folders.flatten().filter_map(entry).collect();
        list.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.id.cmp(&b.id)));
        list
    }

    /// The copy of a model, begun if there is none.
    pub(crate) fn open(&self, manifest: Manifest, name: &str) -> Result<Copy, String> {
        let folder = self.place(&manifest.id());
        fs::create_dir_all(&folder).map_err(words(&folder))?;
        let open = |file: &str| {
            let path = folder.join(file);
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            options.open(&path).map_err(words(&path))
        };
        // Nobody removes what somebody uses.
        let used = open("used")?;
        flock(&used, FlockOperation::LockShared)
            .map_err(|error| words(&folder)(io::Error::from(error)))?;
        used.set_modified(SystemTime::now()).map_err(words(&folder))?;
        let (path, count) = (folder.join("model.gguf"), chunk_count(manifest.length()));
        let (model, present) = (open("model.gguf")?, open("present")?);
        let length = model.metadata().map_err(words(&path))?.len();
        if length != 0 && length != manifest.length() {
            let expected = manifest.length();
            return Err(format!("{}: {length} bytes, expected {expected}", path.display()));
        }
        model.set_len(manifest.length()).map_err(words(&path))?;
        let mut marks = vec![0; count as usize];
        let there = present.metadata().map_err(words(&path))?.len();
        present.read_exact_at(&mut marks[..there.min(count) as usize], 0).map_err(words(&path))?;
        for (file, bytes) in [("manifest", manifest.to_bytes()), ("name", name.into())] {
            crate::files::write(&folder.join(file), bytes).map_err(|error| error.to_string())?;
        }
        let (marks, unmarked) = (RefCell::new(marks), RefCell::default());
        let (cache, fetched, name) = (self.clone(), Cell::new(0), name.to_owned());
        let marker = RefCell::new(Marker::Ready(present));
        Ok(Copy {
            cache,
            manifest,
            name,
            path,
            model,
            marks,
            unmarked,
            marker,
            fetched,
            _used: used,
        })
    }

    /// Removes what was used longest ago until there is space for `bytes` besides what is in use.
    fn make_space(&self, own: &str, bytes: u64) {
        let entries = self.entries();
        let mut held: u64 = entries.iter().map(|entry| entry.held).sum();
        for entry in entries.iter().rev().filter(|entry| entry.id != own) {
            if held.saturating_add(bytes) <= self.limit {
                break;
            }
            let folder = self.place(&entry.id);
            let Ok(used) = File::open(folder.join("used")) else { continue };
            if flock(&used, FlockOperation::NonBlockingLockExclusive).is_ok()
                && fs::remove_dir_all(&folder).is_ok()
            {
                held -= entry.held;
            }
        }
    }
}

/// Bytes of the chunks that are marked.
fn held(length: u64, marks: &[u8]) -> u64 {
    let there = marks.iter().enumerate().filter(|(_, mark)| **mark == THERE);
    let bytes = there.map(|(number, _)| {
        let range = chunk_range(length, number as u64);
        range.end - range.start
    });
    bytes.sum()
}

/// A model's file with holes.
#[derive(Debug)]
pub(crate) struct Copy {
    cache: Cache,
    manifest: Manifest,
    /// What the leader calls it.
    name: String,
    path: PathBuf,
    model: File,
    /// A byte for each chunk.
    marks: RefCell<Vec<u8>>,
    /// Chunks that were written and are not with the marker yet.
    unmarked: RefCell<Vec<u64>>,
    marker: RefCell<Marker>,
    fetched: Cell<u64>,
    /// Locked as long as this lives.
    _used: File,
}

impl Copy {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that came since it was opened.
    pub(crate) fn fetched(&self) -> u64 {
        self.fetched.get()
    }

    /// Has what was written made safe, and then marked.
    fn mark(&self) -> io::Result<()> {
        let mut unmarked = self.unmarked.borrow_mut();
        if unmarked.is_empty() {
            return Ok(());
        }
        self.marker.borrow_mut().take(&self.model, std::mem::take(&mut *unmarked))
    }

    /// Waits until all is marked.
    fn settle(&self) {
        // What was not marked is fetched again.
        let _ = self.mark();
        if let Marker::Working(jobs, thread) = self.marker.replace(Marker::Over) {
            drop(jobs);
            let _ = thread.join();
        }
    }
}

/// Who waits for the disk.
#[derive(Debug)]
enum Marker {
    /// Nobody yet; the file of the marks.
    Ready(File),
    Working(SyncSender<Vec<u64>>, JoinHandle<io::Result<()>>),
    Over,
}

impl Marker {
    fn take(&mut self, model: &File, numbers: Vec<u64>) -> io::Result<()> {
        if let Marker::Ready(present) = self {
            let (model, present) = (model.try_clone()?, present.try_clone()?);
            let (jobs, came) = sync_channel(AHEAD);
            let named = std::thread::Builder::new().name("spanker-cache".into());
            let thread = named.spawn(move || mark_all(&model, &present, &came))?;
            *self = Marker::Working(jobs, thread);
        }
        if let Marker::Working(jobs, _) = self
            && jobs.send(numbers).is_ok()
        {
            return Ok(());
        }
        match std::mem::replace(self, Marker::Over) {
            Marker::Working(_, thread) => thread.join().unwrap_or(Ok(())),
            // It has said why not.
            Marker::Ready(_) | Marker::Over => Ok(()),
        }
    }
}

/// Makes what is written safe, then marks it: all that has come while it waited at once.
fn mark_all(model: &File, present: &File, came: &Receiver<Vec<u64>>) -> io::Result<()> {
    while let Ok(mut numbers) = came.recv() {
        numbers.extend(came.try_iter().flatten());
        model.sync_data()?;
        numbers.iter().try_for_each(|&number| present.write_all_at(&[THERE], number))?;
    }
    Ok(())
}

impl Store for Copy {
    fn length(&self) -> u64 {
        self.manifest.length()
    }

    fn missing(&self, ranges: &[Range<u64>]) -> Result<Vec<u64>, String> {
        let (length, marks) = (self.length(), self.marks.borrow());
        let mut wanted = vec![false; marks.len()];
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            if range.end > length {
                return Err(format!("bytes {range:?} of a model of {length} bytes"));
            }
            let (first, last) = (range.start / CHUNK_BYTES, (range.end - 1) / CHUNK_BYTES);
            wanted[first as usize..=last as usize].fill(true);
        }
        let missing = wanted.iter().zip(marks.iter()).enumerate();
        let missing = missing.filter(|(_, (wanted, mark))| **wanted && **mark != THERE);
        let missing: Vec<u64> = missing.map(|(number, _)| number as u64).collect();
        let needed = missing.len() as u64 * CHUNK_BYTES;
        let (own, limit) = (held(length, &marks), self.cache.limit);
        if own.saturating_add(needed) > limit.saturating_add(CHUNK_BYTES) {
            let all = own + needed;
            return Err(format!(
                "its part of the model takes {all} bytes, and --cache-limit is {limit}"
            ));
        }
        if needed > 0 {
            self.cache.make_space(&self.manifest.id(), needed);
        }
        Ok(missing)
    }

    fn put(&self, number: u64, bytes: &[u8]) -> Result<(), String> {
        let shown = self.path.display();
        if !self.manifest.is_chunk(number, bytes) {
            return Err(format!(
                "chunk {number} of {} is not what its manifest says (to be kept in {shown})",
                self.name
            ));
        }
        let start = chunk_range(self.length(), number).start;
        let written = self.model.write_all_at(bytes, start).and_then(|()| {
            self.marks.borrow_mut()[number as usize] = THERE;
            self.unmarked.borrow_mut().push(number);
            self.fetched.set(self.fetched.get() + bytes.len() as u64);
            let full = self.unmarked.borrow().len() >= BATCH;
            if full { self.mark() } else { Ok(()) }
        });
        written.map_err(words(&self.path))
    }

    fn complete(&self) -> Result<(), String> {
        self.mark().map_err(words(&self.path))
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(seed: usize) -> Vec<u8> {
        (0..(5 * CHUNK_BYTES as usize + 9))
            .map(|at| (((at + seed) * 13) >> 4) as u8 ^ (at >> 20) as u8)
            .collect()
    }

    fn cache(folder: &Path, limit: u64) -> Cache {
        Cache { folder: folder.to_path_buf(), limit }
    }

    fn chunk(bytes: &[u8], number: u64) -> &[u8] {
        let range = chunk_range(bytes.len() as u64, number);
        &bytes[range.start as usize..range.end as usize]
    }

    fn missing(copy: &Copy, range: Range<u64>) -> Result<Vec<u64>, String> {
        copy.missing(&[range])
    }

    #[test]
    fn chunks_that_came_are_there_after_a_restart_and_others_are_asked_for_again() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, bytes) = (cache(folder.path(), 1 << 40), bytes(1));
        let manifest = Manifest::of(&bytes);
        let copy = cache.open(manifest.clone(), "x.gguf").unwrap();
        let last = 5 * CHUNK_BYTES..bytes.len() as u64;
        assert_eq!(copy.missing(&[0..1, 7..7, last.clone()]).unwrap(), [0, 5]);
        copy.put(5, chunk(&bytes, 5)).unwrap();
        copy.complete().unwrap();
        assert_eq!(copy.missing(&[0..1, last.clone()]).unwrap(), [0]);
        assert!(missing(&copy, 0..bytes.len() as u64 + 1).is_err());
        drop(copy);
        assert_eq!(cache.manifest(&manifest.id(), bytes.len() as u64), Some(manifest.clone()));
        let copy = cache.open(manifest, "x.gguf").unwrap();
        assert_eq!(missing(&copy, 0..bytes.len() as u64).unwrap(), [0, 1, 2, 3, 4]);
        let kept = fs::read(copy.path()).unwrap();
        assert_eq!(kept[5 * CHUNK_BYTES as usize..], bytes[5 * CHUNK_BYTES as usize..]);
        let [entry] = &cache.entries()[..] else { panic!("{:?}", cache.entries()) };
        assert_eq!((entry.held, entry.length), (9, bytes.len() as u64));
    }

    #[test]
    fn chunk_that_is_another_is_refused_by_its_number_and_file_and_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, bytes) = (cache(folder.path(), 1 << 40), bytes(1));
        let copy = cache.open(Manifest::of(&bytes), "x.gguf").unwrap();
        let error = copy.put(2, chunk(&bytes, 3)).unwrap_err();
        assert!(error.starts_with("chunk 2 of x.gguf") && error.contains("model.gguf"), "{error}");
        assert_eq!(missing(&copy, 2 * CHUNK_BYTES..2 * CHUNK_BYTES + 1).unwrap(), [2]);
    }

    #[test]
    fn what_was_used_longest_ago_goes_first_unless_somebody_uses_it() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path(), 8 * CHUNK_BYTES);
        let fill = |seed: usize| {
            let bytes = bytes(seed);
            let copy = cache.open(Manifest::of(&bytes), "x.gguf").unwrap();
            for number in missing(&copy, 0..3 * CHUNK_BYTES).unwrap() {
                copy.put(number, chunk(&bytes, number)).unwrap();
            }
            copy.complete().unwrap();
            copy.settle();
            copy
        };
        let in_use = fill(1);
        let second = fill(2).manifest.id();
        let third = fill(3).manifest.id();
        let left: Vec<String> = cache.entries().into_iter().map(|entry| entry.id).collect();
        assert!(left.contains(&in_use.manifest.id()) && left.contains(&third), "{left:?}");
        assert!(!left.contains(&second), "{left:?}");
        let too_much = missing(&in_use, 0..in_use.length()).map(|missing| missing.len());
        assert_eq!(too_much, Ok(3));
        let tiny = Cache { limit: CHUNK_BYTES, ..cache.clone() };
        let error = missing(&tiny.open(Manifest::of(&bytes(4)), "x").unwrap(), 0..4 << 20);
        assert!(error.unwrap_err().contains("--cache-limit"));
    }

    #[test]
    fn file_of_another_length_is_named_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, manifest) = (cache(folder.path(), 1 << 40), Manifest::of(&bytes(1)));
        let place = cache.place(&manifest.id());
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("model.gguf"), "short").unwrap();
        let error = cache.open(manifest, "x").unwrap_err();
        assert!(error.contains("model.gguf: 5 bytes, expected"), "{error}");
    }
}
