// SPDX-License-Identifier: Apache-2.0
//! Profiles that were measured on this machine, kept in the user's cache for the next run. A profile is kept under all
//! that it depends on: the program, the processor, the model's shape, the layout, the number of threads.

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use std::fs::File;
use std::io::Read;

use spanker_llm::fingerprint;
use spanker_plan::{Layout, Plan};
use spanker_topology::{Bytes, Profile};

use crate::error::{EngineError, Result};
use crate::host::{Event, Watch};
use crate::memory;
use crate::model::Model;

/// More than any profile has.
const MOST_PROFILE: u64 = 1 << 20;
/// Profiles that are kept.
const MOST_KEPT: usize = 64;

/// Machines of a network that were measured in this time are not measured again before they run.
const RECENT: Duration = Duration::from_secs(15 * 60);

/// How far a run may be from its prediction before what the prediction came from is measured again.
const FAR: f64 = 0.1;

/// Whether what was measured before will do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// What was measured before, if it was.
    Kept,
    /// Measured now.
    Now,
    /// Not measured: for steps whose time nobody asks for.
    Assumed,
}

/// Forgets what was measured for a layout on threads if a run that should take `predicted` for a token took another
/// time: the machine was not quiet then, or is not now. Says in percent by how much, if something was forgotten.
pub(crate) fn doubt(
    model: &Model,
    plan: &Plan,
    threads: usize,
    predicted: f64,
    measured: f64,
) -> Option<f64> {
    let off = measured / predicted - 1.0;
    let batch = measured_batch(plan.request.batch as usize);
    let kept = Kept::of(threads_key(model.shape(), &plan.layout, batch, threads))?;
    (off.abs() > FAR && std::fs::remove_file(&kept.path).is_ok()).then_some(off * 100.0)
}

/// Cards of this machine of which nothing was measured.
pub(crate) fn assumed(layout: &Layout) -> Result<Profile> {
    let cards = layout.cards().last().map_or(1, |card| card + 1);
    Ok(spanker_llm::unmeasured(cards, Bytes(memory::of_machine()))?)
}

/// How something is measured: it is given what to call with the number of rows that comes next.
pub(crate) type Measure<'a> = dyn FnMut(&mut dyn FnMut(usize)) -> Result<Vec<Profile>> + 'a;

/// The profiles that are kept for all that each of `keys` says, or else measured ones, as many, which are kept from then
/// on.
pub(crate) fn kept(
    keys: Vec<String>,
    freshness: Freshness,
    observer: &Watch,
    measure: &mut Measure<'_>,
) -> Result<Vec<Profile>> {
    let kept: Option<Vec<Kept>> = keys.into_iter().map(Kept::of).collect();
    if let (Freshness::Kept, Some(kept)) = (freshness, &kept) {
        match kept.iter().map(Kept::read).collect::<Result<Option<Vec<Profile>>>>() {
            Ok(Some(profiles)) => return Ok(profiles),
            Ok(None) => {}
            Err(error) => observer(&Event::Note(&format!("{error}; measuring again"))),
        }
    }
    let measured = measure(&mut |rows| observer(&Event::Measuring { rows }));
    observer(&Event::Done);
    let profiles = measured?;
    for (kept, profile) in kept.iter().flatten().zip(&profiles) {
        // Whoever cannot keep it measures again next time.
        let _ = kept.write(profile);
    }
    Ok(profiles)
}

/// Whether what is kept for all of these keys was measured a short time ago.
pub(crate) fn are_recent(keys: &[String]) -> bool {
    keys.iter().all(|key| Kept::of(key.clone()).is_some_and(|kept| kept.is_recent()))
}

/// Keeps profiles that were measured again, each for its key.
pub(crate) fn keep(keys: Vec<String>, profiles: &[Profile]) {
    for (kept, profile) in keys.into_iter().filter_map(Kept::of).zip(profiles) {
        // Whoever cannot keep it measures again next time.
        let _ = kept.write(profile);
    }
}

/// Rows that are measured. One measurement is for all contexts, those included that are shorter than a usual batch.
pub(crate) fn measured_batch(batch: usize) -> usize {
    batch.max(spanker_plan::USUAL_BATCH as usize)
}

/// All that a measurement of cards that are threads of this process depends on.
pub(crate) fn threads_key(
    model: &spanker_model::Model,
    layout: &Layout,
    batch: usize,
    threads: usize,
) -> String {
    format!("{}; inproc", key(model, layout, batch, threads))
}

/// All that a measurement depends on, in one line.
pub(crate) fn key(
    model: &spanker_model::Model,
    layout: &Layout,
    batch: usize,
    threads: usize,
) -> String {
    let nameless = spanker_model::Model { name: String::new(), ..model.clone() };
    let shape =
        |text: Result<String, serde_json::Error>| fingerprint(text.unwrap_or_default().bytes());
    let (model, layout) =
        (shape(serde_json::to_string(&nameless)), shape(serde_json::to_string(layout)));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!(
        "spanker {} {:016x}; {}; {cores} cores; {} bytes; {threads} threads; {batch} rows; model {model:016x}; layout {layout:016x}",
        env!("CARGO_PKG_VERSION"),
        program(),
        processor(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
        memory::of_machine(),
    )
}

/// A number that changes when this program is built again: its version stays the same while it is worked on.
fn program() -> u64 {
    let file = std::env::current_exe().and_then(std::fs::metadata);
    let Ok(file) = file else { return 0 };
    let built = file.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let built = built.map_or(0, |time| time.as_nanos() as u64);
    fingerprint([file.len(), built].into_iter().flat_map(u64::to_le_bytes))
}

/// What the system calls the processor.
pub(crate) fn processor_name() -> String {
    let listed = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    processor(&listed).split(',').next().unwrap_or("?").to_owned()
}

/// The processor by its name and numbers, as the system lists them.
fn processor(listed: &str) -> String {
    let value = |name: &str| {
        let mut lines = listed.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.trim() == name).map_or("?", |(_, value)| value.trim()).to_owned()
    };
    let names = ["model name", "cpu family", "model", "stepping", "cache size"];
    names.map(value).join(", ")
}

/// The folder for what can be had again: `$SPANKER_CACHE`, or `spanker` in the user's cache. Nothing where no variable
/// names one.
#[must_use]
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    match (set("SPANKER_CACHE"), set("XDG_CACHE_HOME"), set("HOME")) {
        (Some(cache), ..) => Some(PathBuf::from(cache)),
        // A relative one is no folder of the user's, by its definition.
        (_, Some(cache), _) if Path::new(&cache).is_absolute() => {
            Some(Path::new(&cache).join("spanker"))
        }
        (_, _, Some(home)) => Some(Path::new(&home).join(".cache/spanker")),
        _ => None,
    }
}

/// A profile in the user's cache.
struct Kept {
    path: PathBuf,
    key: String,
}

impl Kept {
    /// Where the profile for a key is kept; without a folder nothing is, and everything is measured again.
    fn of(key: String) -> Option<Kept> {
        cache_folder().map(|cache| Kept::new(&cache.join("profiles"), key))
    }

    fn new(folder: &Path, key: String) -> Kept {
        let name = format!("{:016x}.toml", fingerprint(key.bytes()));
        Kept { path: folder.join(name), key }
    }

    /// The profile, if there is one.
    fn read(&self) -> Result<Option<Profile>> {
        use std::io::ErrorKind::{NotADirectory, NotFound};
        let wrong = |what: &dyn std::fmt::Display| EngineError::file(&self.path, what);
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), NotFound | NotADirectory) => return Ok(None),
            Err(error) => return Err(wrong(&error)),
        };
        let mut text = String::new();
        file.take(MOST_PROFILE).read_to_string(&mut text).map_err(|error| wrong(&error))?;
        let first = text.lines().next().and_then(|line| line.strip_prefix("# "));
        if first != Some(&self.key) {
            return Err(wrong(&"not for this machine and model"));
        }
        Profile::from_toml(&text).map(Some).map_err(|error| wrong(&error))
    }

    /// Whether it was written a short time ago. What is from the future is as old as can be.
    fn is_recent(&self) -> bool {
        let written = std::fs::metadata(&self.path).and_then(|file| file.modified()).ok();
        let age = written.and_then(|written| written.elapsed().ok());
        age.is_some_and(|age| age < RECENT)
    }

    /// Writes all of it or nothing: to a file beside it that then takes its name.
    fn write(&self, profile: &Profile) -> std::io::Result<()> {
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let beside = self.path.with_extension(format!("{}.tmp", std::process::id()));
        std::fs::write(&beside, format!("# {}\n{}", self.key, profile.to_toml()))?;
        std::fs::rename(&beside, &self.path)?;
        self.forget_oldest();
        Ok(())
    }

    /// Removes what is one too many: profiles of programs and models that are no more would never be read again.
    fn forget_oldest(&self) {
        let Some(entries) = self.path.parent().and_then(|folder| folder.read_dir().ok()) else {
            return;
        };
        let written = |entry: std::fs::DirEntry| {
            let path = entry.path();
            let time = entry.metadata().and_then(|file| file.modified()).ok()?;
            (path.extension()? == "toml").then_some((time, path))
        };
        let mut files: Vec<_> = entries.flatten().filter_map(written).collect();
        files.sort_unstable();
        for (_, path) in files.iter().take(files.len().saturating_sub(MOST_KEPT)) {
            // Another process may have done so.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_model::{Model, Quant, builtin};
    use spanker_plan::Split;

    fn layout(model: &Model, cards: usize) -> Layout {
        let cards = (0..cards).map(|card| (card, 1.0)).collect();
        Layout::of_groups(model, Split::Gather, &[cards]).unwrap()
    }

    #[test]
    fn key_depends_on_shape_types_layout_rows_and_threads_and_not_on_the_name() {
        let model = builtin("tinyllama-1.1b", Quant::Q4_0).unwrap();
        let one = layout(&model, 1);
        let usual = key(&model, &one, 128, 2);
        assert!(usual.contains(env!("CARGO_PKG_VERSION")) && !usual.contains('\n'), "{usual}");
        let renamed = Model { name: "other".into(), ..model.clone() };
        assert_eq!(key(&renamed, &one, 128, 2), usual);
        let others = [
            key(&builtin("tinyllama-1.1b", Quant::Q8_0).unwrap(), &one, 128, 2),
            key(&model, &layout(&model, 2), 128, 2),
            key(&model, &one, 64, 2),
            key(&model, &one, 128, 1),
        ];
        others.iter().for_each(|other| assert_ne!(*other, usual));
    }

    #[test]
    fn kept_profile_comes_back_and_stale_broken_and_missing_ones_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let kept = Kept::new(&folder.path().join("profiles"), "one key".into());
        assert_eq!(kept.read().unwrap(), None);
        let profile = Profile::builtin("rev-a").unwrap();
        kept.write(&profile).unwrap();
        assert_eq!(kept.read().unwrap(), Some(profile.clone()));
        // The same file under another key, as after a change of the hash.
        let other = Kept { path: kept.path.clone(), key: "another key".into() };
        assert!(other.read().unwrap_err().to_string().contains("not for this machine"));
        let text = std::fs::read_to_string(&kept.path).unwrap();
        std::fs::write(&kept.path, &text[..text.len() / 2]).unwrap();
        assert!(kept.read().unwrap_err().to_string().contains("toml"));
        kept.write(&profile).unwrap();
        assert_eq!(kept.read().unwrap(), Some(profile));
        assert!(kept.is_recent());
        let now = std::time::SystemTime::now();
        for at in [now - RECENT, now + Duration::from_secs(60)] {
            let file = File::options().write(true).open(&kept.path).unwrap();
            file.set_modified(at).unwrap();
            assert!(!kept.is_recent(), "{at:?}");
        }
        std::fs::remove_file(&kept.path).unwrap();
        assert!(!kept.is_recent());
    }

    #[test]
    fn oldest_profiles_are_forgotten_and_other_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let profile = Profile::builtin("rev-a").unwrap();
        std::fs::write(folder.path().join("notes.txt"), "").unwrap();
        let keys = (0..MOST_KEPT + 3).map(|at| Kept::new(folder.path(), format!("key {at}")));
        let keys: Vec<Kept> = keys.collect();
        keys.iter().for_each(|kept| kept.write(&profile).unwrap());
        assert_eq!(folder.path().read_dir().unwrap().count(), MOST_KEPT + 1);
        assert_eq!(keys.last().unwrap().read().unwrap(), Some(profile));
    }

    #[test]
    fn folder_that_cannot_be_made_is_an_error_of_writing_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let kept = Kept::new(&file.join("profiles"), "key".into());
        assert_eq!(kept.read().unwrap(), None);
        assert!(kept.write(&Profile::builtin("rev-a").unwrap()).is_err());
    }

    #[test]
    fn processor_is_named_with_its_numbers() {
        let listed = "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC\ncpu family : 25\n";
        assert_eq!(processor(listed), "AMD EPYC, 25, 17, ?, ?");
    }
}
