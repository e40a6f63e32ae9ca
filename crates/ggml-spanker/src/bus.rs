// SPDX-License-Identifier: Apache-2.0
//! What happens when a page of a mapped file cannot be had, because somebody has cut the file short or the disk fails:
//! an error that names the file and exit code 1, instead of a process that a signal kills without a word.
//!
//! The kernel reports such a page as `SIGBUS` in the middle of an instruction, so there is nothing to return an error
//! to. The handler looks only at atomics and memory that is never freed, writes one line and ends the process. Faults
//! elsewhere go to whoever handled them before.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// One mapping that is watched. Entries are never freed, because a handler may be looking at them; they are used again.
struct Entry {
    /// The first address; 0 for an entry that is free.
    start: AtomicUsize,
    /// The first address beyond the mapping.
    end: AtomicUsize,
    /// What is said when a page is gone.
    message: AtomicPtr<&'static str>,
    next: Option<&'static Entry>,
}

/// The entry that was added last; the others follow from it.
static ENTRIES: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());
/// Messages by path: a file that is opened again and again takes memory once. The lock orders all changes of entries.
static MESSAGES: Mutex<BTreeMap<String, &'static &'static str>> = Mutex::new(BTreeMap::new());
/// Who handled the signal before, from when the handler is installed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// A mapping is watched as long as this lives.
#[derive(Debug)]
pub(crate) struct Watched(&'static Entry);

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}..", self.start.load(Ordering::Relaxed))
    }
}

impl Watched {
    /// Watches the mapping `bytes` of the file `path`.
    pub(crate) fn new(bytes: &[u8], path: &Path) -> Watched {
        let mut messages = MESSAGES.lock().unwrap_or_else(PoisonError::into_inner);
        install();
        let shown = path.display().to_string();
        let message = *messages.entry(shown).or_insert_with_key(|shown| {
            let text = format!("error: {shown}: cut short or unreadable while it was in use\n");
            Box::leak(Box::new(&*text.leak()))
        });
        let entry = free().unwrap_or_else(add);
        let range = bytes.as_ptr_range();
        entry.message.store(ptr::from_ref(message).cast_mut(), Ordering::Release);
        entry.end.store(range.end.addr(), Ordering::Release);
        // Last, so that whoever sees the start sees the rest.
        entry.start.store(range.start.addr().max(1), Ordering::Release);
        Watched(entry)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _order = MESSAGES.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.end.store(0, Ordering::Release);
        self.0.start.store(0, Ordering::Release);
    }
}

/// All entries, the one that was added last first.
fn entries() -> impl Iterator<Item = &'static Entry> {
    // SAFETY: the pointer is null or comes from a box that was leaked.
    let first = unsafe { ENTRIES.load(Ordering::Acquire).as_ref() };
    std::iter::successors(first, |entry| entry.next)
}

/// An entry that nobody uses. The caller has the lock.
fn free() -> Option<&'static Entry> {
    entries().find(|entry| entry.start.load(Ordering::Acquire) == 0)
}

/// A new entry. The caller has the lock.
fn add() -> &'static Entry {
    let entry: &'static Entry = Box::leak(Box::new(Entry {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        message: AtomicPtr::new(ptr::null_mut()),
        next: entries().next(),
    }));
    ENTRIES.store(ptr::from_ref(entry).cast_mut(), Ordering::Release);
    entry
}

/// Takes the signal, once. The caller has the lock.
fn install() {
    if !BEFORE.load(Ordering::Acquire).is_null() {
        return;
    }
    // SAFETY: a signal action of zeros is a valid one; all its fields that count are set below.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handle as *const () as usize;
    // On the alternative stack, where a thread has one: its own may be what is in the way.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: as above.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: only reads and writes the two actions, which live here.
    let asked = unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) };
    if asked != 0 {
        return;
    }
    // Known before the first signal can come.
    BEFORE.store(Box::into_raw(Box::new(before)), Ordering::Release);
    // SAFETY: the handler does only what a signal handler may do; see there. That it could not be installed leaves the
    // signal as it was.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
}

/// Says which file it is and ends the process, or leaves the fault to whoever handled it before.
///
/// Calls nothing but `write`, `_exit` and `sigaction`, which signal handlers may call, and allocates nothing.
extern "C" fn handle(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes what is known of the signal, and it lives while the handler runs.
    let address = unsafe { (*info).si_addr() }.addr();
    let hit = |entry: &&Entry| {
        let start = entry.start.load(Ordering::Acquire);
        start != 0 && (start..entry.end.load(Ordering::Acquire)).contains(&address)
    };
    if let Some(entry) = entries().find(hit) {
        // SAFETY: a message is set before an entry has a start, and messages are never freed.
        if let Some(message) = unsafe { entry.message.load(Ordering::Acquire).as_ref() } {
            // SAFETY: the bytes are those of a text that is never freed.
            unsafe { libc::write(2, message.as_ptr().cast(), message.len()) };
        }
        // SAFETY: ends the process at once: other threads may hold any lock.
        unsafe { libc::_exit(1) };
    }
    // The instruction is tried again when this returns, and its fault then goes where it went before.
    let before = BEFORE.load(Ordering::Acquire);
    // SAFETY: the action was stored before this handler was installed, and is never freed.
    unsafe { libc::sigaction(libc::SIGBUS, before, ptr::null_mut()) };
}
