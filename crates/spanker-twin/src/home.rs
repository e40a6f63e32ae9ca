// SPDX-License-Identifier: Apache-2.0
//! The directory of a twin: where programs find its cards. The process that holds its lock owns everything
//! in it; without the lock nothing is removed, so a late cleanup cannot remove a later twin's files.

use std::fs::{self, DirBuilder, File, FileType, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};

use crate::TwinError;
use crate::error::Tried;

/// The supervisor's control socket.
pub const CONTROL_SOCKET: &str = "twin";
/// What was asked for, for programs and people.
pub const RECORD: &str = "twin.json";
/// What a measurement of the links found. Others write it; it goes with the twin.
pub const LINKS: &str = "links.toml";
const LOCK: &str = "lock";

/// How long a lock may be held by someone who is no supervisor: a card that cleans up, a supervisor that begins.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How long a supervisor that was killed may still seem to hold its lock: its cards see the end of their
/// sockets before the kernel has closed all its files.
const DYING: Duration = Duration::from_millis(500);

/// The most bytes in the path of a socket.
const MOST_SOCKET_PATH: usize = 107;

/// Where twins live unless a flag says otherwise: `$SPANKER_DEV_DIR`, or `spanker` in
/// `$XDG_RUNTIME_DIR`, or `/tmp/spanker-UID`.
#[must_use]
pub fn find() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let dir = match (set("SPANKER_DEV_DIR"), set("XDG_RUNTIME_DIR")) {
        (Some(dir), _) => PathBuf::from(dir),
        (None, Some(dir)) => Path::new(&dir).join("spanker"),
        (None, None) => format!("/tmp/spanker-{}", rustix::process::geteuid().as_raw()).into(),
    };
    // Cards and supervisor run elsewhere, so a relative path would mean another directory to them.
    let dir = std::path::absolute(&dir).unwrap_or(dir);
    dir.components().collect()
}

/// The socket of a card.
#[must_use]
pub fn card(dir: &Path, index: u32) -> PathBuf {
    dir.join(format!("spanker{index}"))
}

/// A directory whose lock is held. It is emptied and removed when this is dropped.
#[derive(Debug)]
pub struct Home {
    dir: PathBuf,
    lock: Option<File>,
}

impl Home {
    /// Claims a directory: creates it if there is none, removes what a dead twin left in it.
    ///
    /// # Errors
    /// [`TwinError::Directory`] for one that is not safe or holds files of others, [`TwinError::Up`] for
    /// one that a twin has.
    pub fn claim(dir: &Path) -> Result<Home, TwinError> {
        let longest = dir.join("spanker99").as_os_str().len();
        if longest > MOST_SOCKET_PATH {
            let over = longest - MOST_SOCKET_PATH;
            let reason = format!("the path of a socket in it would be {over} bytes too long");
            return Err(TwinError::directory(dir, reason));
        }
        let end = Instant::now() + TIMEOUT;
        loop {
            make(dir)?;
            // Before the lock, so that nothing is created among files of others, and after it, so that
            // nobody has put any there.
            refuse_foreign(dir)?;
            match lock(dir, true).tried(|| format!("lock {}", dir.display()))? {
                Locked::Held(file) => {
                    let mut home = Home { dir: dir.to_path_buf(), lock: Some(file) };
                    if let Err(error) = refuse_foreign(dir) {
                        home.unlock();
                        return Err(error);
                    }
                    home.begin()?;
                    return Ok(home);
                }
                Locked::Busy => {
                    let up = UnixStream::connect(dir.join(CONTROL_SOCKET)).is_ok();
                    if up || Instant::now() > end {
                        return Err(TwinError::Up { dir: dir.to_path_buf(), pid: holder(dir) });
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                // Whoever removed it goes on to remove the directory.
                Locked::Gone if Instant::now() < end => std::thread::yield_now(),
                Locked::Gone => {
                    return Err(TwinError::directory(dir, "it vanishes again and again"));
                }
            }
        }
    }

    fn begin(&mut self) -> Result<(), TwinError> {
        let Home { dir, lock } = self;
        empty(dir).tried(|| format!("empty {}", dir.display()))?;
        let lock = lock.as_mut().expect("the lock is held");
        let written = lock.set_len(0).and_then(|()| write!(lock, "{}", std::process::id()));
        written.tried(|| format!("write {}", dir.join(LOCK).display()))
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes a file so that readers see all of it or what was there before.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, name: &str, text: &str) -> Result<(), TwinError> {
        let (beside, path) = (self.dir.join(format!("{name}.tmp")), self.dir.join(name));
        let written = fs::write(&beside, text).and_then(|()| fs::rename(&beside, &path));
        written.tried(|| format!("write {}", path.display()))
    }

    /// Removes everything of the twin and then the directory. Returns the files that stay because they
    /// belong to others.
    #[must_use]
    pub fn release(mut self) -> Vec<String> {
        self.clear()
    }

    fn clear(&mut self) -> Vec<String> {
        let Some(lock) = self.lock.take() else { return Vec::new() };
        let left = remove(&self.dir, &lock);
        left.unwrap_or_else(|error| vec![format!("{} ({error})", self.dir.display())])
    }

    /// Gives up a directory that is not ours after all, with what it had in it.
    fn unlock(&mut self) {
        let _ = fs::remove_file(self.dir.join(LOCK));
        self.lock = None;
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Removes what a twin left in a directory, and then the directory, unless somebody holds it for longer
/// than half a second: a supervisor that lives. Returns the files of others that stay. Safe to call from many
/// processes at once.
///
/// # Errors
/// What the system says. There is nothing to do for a directory that is not there.
pub fn sweep(dir: &Path) -> io::Result<Vec<String>> {
    let end = Instant::now() + DYING;
    while check(dir).is_ok() {
        match lock(dir, false)? {
            Locked::Held(file) => return remove(dir, &file),
            // The lock goes last, but whoever removed it may have died before the directory went.
            Locked::Gone => return remove_directory(dir),
            Locked::Busy if Instant::now() > end => break,
            Locked::Busy => std::thread::sleep(Duration::from_millis(2)),
        }
    }
    Ok(Vec::new())
}

/// The process that holds a directory, as far as it has said so.
#[must_use]
pub fn holder(dir: &Path) -> Option<u32> {
    let mut text = String::new();
    let file = open_lock(dir, false).ok()?;
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// Whether there are files of a twin in a directory.
#[must_use]
pub fn littered(dir: &Path) -> bool {
    listed(dir).is_ok_and(|(ours, _)| !ours.is_empty())
}

/// Whether a directory is there and safe to use: a real one, ours, that nobody else can write to.
///
/// # Errors
/// [`TwinError::Directory`] with its owner and mode.
pub fn check(dir: &Path) -> Result<(), TwinError> {
    let found = fs::symlink_metadata(dir).tried(|| format!("inspect {}", dir.display()))?;
    let ours = rustix::process::geteuid().as_raw();
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    let reason = if found.is_symlink() {
        "it is a symbolic link, not a directory".into()
    } else if !found.is_dir() {
        "it is not a directory".into()
    } else if owner != ours {
        format!("it belongs to uid {owner} (mode {mode:04o}), not to uid {ours}")
    } else if mode & 0o022 != 0 {
        format!("others can write to it (uid {owner}, mode {mode:04o})")
    } else {
        return Ok(());
    };
    Err(TwinError::directory(dir, reason))
}

fn make(dir: &Path) -> Result<(), TwinError> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).tried(|| format!("create {}", dir.display()))
        }
        _ => match check(dir) {
            // It was there a moment ago: whoever removed it is done, and the next round creates it.
            Err(TwinError::System { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
            outcome => outcome,
        },
    }
}

/// Whether a file of this name and type is a twin's.
fn known(name: &str, kind: FileType) -> bool {
    let is_card = |name: &str| {
        let digits = name.strip_prefix("spanker").unwrap_or("");
        !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    let unfinished = |name: &str| {
        name.ends_with(".tmp") && [RECORD, LINKS].iter().any(|file| name.starts_with(file))
    };
    match name {
        LOCK | RECORD | LINKS => kind.is_file(),
        CONTROL_SOCKET => kind.is_socket(),
        _ => (is_card(name) && kind.is_socket()) || (unfinished(name) && kind.is_file()),
    }
}

/// The files in a directory: those of a twin, and those of others.
fn listed(dir: &Path) -> io::Result<(Vec<PathBuf>, Vec<String>)> {
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        match entry.file_type() {
            Ok(kind) if known(&name, kind) => ours.push(entry.path()),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            _ => others.push(name),
        }
    }
    others.sort();
    Ok((ours, others))
}

fn refuse_foreign(dir: &Path) -> Result<(), TwinError> {
    let others = match listed(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        found => found.tried(|| format!("read {}", dir.display()))?.1,
    };
    let Some(first) = others.first() else { return Ok(()) };
    let more = match others.len() {
        1 => String::new(),
        count => format!(" and {} more", count - 1),
    };
    let reason = format!("it holds files that no twin made: {first}{more}");
    Err(TwinError::directory(dir, reason))
}

enum Locked {
    /// Ours, for as long as the file is open.
    Held(File),
    /// Somebody else's.
    Busy,
    /// There is no lock, or no longer the one that was opened.
    Gone,
}

fn open_lock(dir: &Path, create: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(create).mode(0o600);
    options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(dir.join(LOCK))
}

fn lock(dir: &Path, create: bool) -> io::Result<Locked> {
    let file = match open_lock(dir, create) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Locked::Gone),
        outcome => outcome?,
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(Locked::Busy),
        outcome => outcome?,
    }
    // A lock on a file that somebody has removed in the meantime locks nothing.
    let there = fs::symlink_metadata(dir.join(LOCK)).map(|there| (there.dev(), there.ino()));
    let mine = file.metadata()?;
    match there {
        Ok(there) if there == (mine.dev(), mine.ino()) => Ok(Locked::Held(file)),
        Ok(_) => Ok(Locked::Gone),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Locked::Gone),
        Err(error) => Err(error),
    }
}

/// Removes everything of a twin but the lock. Returns the files of others.
fn empty(dir: &Path) -> io::Result<Vec<String>> {
    let (ours, others) = listed(dir)?;
    for path in ours.iter().filter(|path| !path.ends_with(LOCK)) {
        gone(fs::remove_file(path))?;
    }
    Ok(others)
}

/// Empties a directory whose lock is held, and removes it. The lock goes last: until then nobody else
/// puts anything there.
fn remove(dir: &Path, _held: &File) -> io::Result<Vec<String>> {
    match empty(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        outcome => outcome?,
    };
    gone(fs::remove_file(dir.join(LOCK)))?;
    remove_directory(dir)
}

fn remove_directory(dir: &Path) -> io::Result<Vec<String>> {
    match fs::remove_dir(dir) {
        // Files of others, or of a twin that begins at this moment.
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {
            listed(dir).map(|(_, others)| others).or_else(|error| gone(Err(error)).map(|()| vec![]))
        }
        outcome => gone(outcome).map(|()| Vec::new()),
    }
}

/// What is gone already need not be removed.
fn gone(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        outcome => outcome,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;
    use std::sync::Barrier;
    use std::thread;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let outer = tempfile::tempdir().unwrap();
        let dir = outer.path().join("cards");
        (outer, dir)
    }

    #[test]
    fn directory_that_is_claimed_is_private_and_gone_afterwards() {
        let (_outer, dir) = place();
        let home = Home::claim(&dir).unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o7777, 0o700);
        let _control = UnixListener::bind(dir.join(CONTROL_SOCKET)).unwrap();
        let _card = UnixListener::bind(card(&dir, 12)).unwrap();
        home.write(RECORD, "{}").unwrap();
        fs::write(dir.join(LINKS), "").unwrap();
        assert_eq!(home.release(), Vec::<String>::new());
        assert!(!dir.exists());
    }

    #[test]
    fn directory_that_is_held_is_refused_with_the_pid_and_not_swept() {
        let (_outer, dir) = place();
        let home = Home::claim(&dir).unwrap();
        let _control = UnixListener::bind(dir.join(CONTROL_SOCKET)).unwrap();
        let error = Home::claim(&dir).unwrap_err();
        let said = format!("(supervisor pid {})", std::process::id());
        assert!(error.to_string().ends_with(&said), "{error}");
        assert!(sweep(&dir).unwrap().is_empty());
        assert!(dir.join(CONTROL_SOCKET).exists());
        drop(home);
        assert!(!dir.exists());
    }

    #[test]
    fn leavings_of_a_dead_twin_are_swept_or_replaced() {
        let (_outer, dir) = place();
        let litter = || {
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join(LOCK), "99999999").unwrap();
            fs::write(dir.join(LINKS), "").unwrap();
            drop(UnixListener::bind(card(&dir, 0)).unwrap());
        };
        litter();
        assert!(sweep(&dir).unwrap().is_empty());
        assert!(!dir.exists());
        litter();
        let home = Home::claim(&dir).unwrap();
        assert!(!card(&dir, 0).exists() && holder(&dir) == Some(std::process::id()));
        drop(home);
        assert!(!dir.exists());
        assert!(sweep(&dir).unwrap().is_empty());
    }

    #[test]
    fn files_of_others_are_refused_before_and_kept_after() {
        let (_outer, dir) = place();
        fs::create_dir(&dir).unwrap();
        // The name of a card, but not a card.
        fs::write(dir.join("spanker0"), "mine").unwrap();
        let error = Home::claim(&dir).unwrap_err().to_string();
        assert!(error.contains("no twin made: spanker0"), "{error}");
        assert!(!dir.join(LOCK).exists());
        fs::remove_file(dir.join("spanker0")).unwrap();
        let home = Home::claim(&dir).unwrap();
        fs::write(dir.join("notes"), "mine").unwrap();
        assert_eq!(home.release(), ["notes"]);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    }

    #[test]
    fn directory_that_is_not_safe_is_refused_with_the_reason() {
        let (outer, dir) = place();
        fs::create_dir(&dir).unwrap();
        let link = outer.path().join("link");
        symlink(&dir, &link).unwrap();
        let error = Home::claim(&link).unwrap_err().to_string();
        assert!(error.contains("symbolic link"), "{error}");
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        let error = Home::claim(&dir).unwrap_err().to_string();
        assert!(error.contains("others can write") && error.contains("mode 0777"), "{error}");
        let file = outer.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Home::claim(&file).unwrap_err().to_string();
        assert!(error.contains("not a directory"), "{error}");
        let long = outer.path().join("x".repeat(100));
        let error = Home::claim(&long).unwrap_err().to_string();
        assert!(error.contains("bytes too long"), "{error}");
        assert!(!long.exists());
    }

    #[test]
    fn of_many_who_claim_and_sweep_at_once_one_holds_at_a_time() {
        let (_outer, dir) = place();
        let start = Barrier::new(8);
        let holders = std::sync::atomic::AtomicUsize::new(0);
        let wins = std::sync::atomic::AtomicUsize::new(0);
        let order = std::sync::atomic::Ordering::SeqCst;
        thread::scope(|scope| {
            for worker in 0..8 {
                let (dir, start, holders, wins) = (&dir, &start, &holders, &wins);
                scope.spawn(move || {
                    start.wait();
                    for _ in 0..50 {
                        if worker % 2 == 0 {
                            let _ = sweep(dir);
                            continue;
                        }
                        let Ok(home) = Home::claim(dir) else { continue };
                        assert_eq!(holders.fetch_add(1, order), 0);
                        let control = UnixListener::bind(dir.join(CONTROL_SOCKET)).unwrap();
                        thread::yield_now();
                        assert!(dir.join(CONTROL_SOCKET).exists());
                        holders.fetch_sub(1, order);
                        wins.fetch_add(1, order);
                        drop(control);
                        drop(home);
                    }
                });
            }
        });
        assert!(wins.into_inner() > 0);
        assert!(!dir.exists());
    }
}
