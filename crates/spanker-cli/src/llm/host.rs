// SPDX-License-Identifier: Apache-2.0
//! What this machine does with a model when threads are its cards, as a card's profile: so that a run on threads has
//! a prediction, too. It is measured once, and kept for the next run.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::Context;
use spanker_llm::{Subject, fingerprint, measure};
use spanker_model::Model;
use spanker_plan::{Layout, Plan, Request};
use spanker_topology::{Bytes, Cluster, Profile, Shape};

use super::Loaded;
use crate::{files, models, output};

/// More than any profile has.
const MOST_PROFILE: u64 = 1 << 20;
/// Profiles that are kept.
const MOST_KEPT: usize = 64;
/// Memory where the system does not say how much there is.
const UNKNOWN_MEMORY: u64 = 1_000_000_000_000;

/// How far a run may be from its prediction before what the prediction came from is measured again.
const FAR: f64 = 0.1;

/// Whether what was measured before will do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// What was measured before, if it was.
    Kept,
    /// Measured now.
    Now,
}

/// A layout on cards that are threads of this process, `threads` in all, with the prices of this machine.
pub(crate) fn plan(
    loaded: &Loaded,
    threads: usize,
    layout: Layout,
    request: Request,
    freshness: Freshness,
) -> anyhow::Result<Plan> {
    let profile = profile(loaded, threads, &layout, freshness)?;
    let cards = layout.cards().last().map_or(1, |card| card + 1);
    let cluster = Cluster::uniform(profile, cards, Shape::Switch)?;
    Ok(Plan::new(loaded.network.model().clone(), cluster, request, layout)?)
}

/// A layout for cards whose times nobody asks for.
pub(crate) fn unpriced(loaded: &Loaded, layout: Layout, request: Request) -> anyhow::Result<Plan> {
    let cards = layout.cards().last().map_or(1, |card| card + 1);
    let cluster = Cluster::uniform(Profile::builtin("rev-a")?, cards, Shape::Switch)?;
    Ok(Plan::new(loaded.network.model().clone(), cluster, request, layout)?)
}

/// A plan that was made elsewhere, with the prices of this machine.
pub(crate) fn priced(loaded: &Loaded, threads: usize, plan: Plan) -> anyhow::Result<Plan> {
    spanker_llm::check_plan(&loaded.network, &plan)?;
    self::plan(loaded, threads, plan.layout, plan.request, Freshness::Kept)
}

/// Forgets what was measured for a layout if a run that should take `predicted` for a token took another time: the
/// machine was not quiet then, or is not now. Says so.
pub(crate) fn doubt(loaded: &Loaded, layout: &Layout, predicted: f64, measured: f64) {
    let off = measured / predicted - 1.0;
    let kept = Kept::of(threads_key(loaded, layout, loaded.threads));
    if off.abs() > FAR
        && let Some(kept) = kept
        && std::fs::remove_file(&kept.path).is_ok()
    {
        let word = if off < 0.0 { "faster" } else { "slower" };
        let percent = off.abs() * 100.0;
        eprintln!(
            "note: this machine is {percent:.0} % {word} than when it was measured; the next run measures it again"
        );
    }
}

/// A card of a layout on threads of this machine.
pub(crate) fn profile(
    loaded: &Loaded,
    threads: usize,
    layout: &Layout,
    freshness: Freshness,
) -> anyhow::Result<Profile> {
    let batch = measured_batch(loaded);
    let key = threads_key(loaded, layout, threads);
    let subject = Subject { layout, batch, threads, memory: Bytes(memory_of_machine()) };
    kept(key, freshness, &mut |progress| Ok(measure(&loaded.network, &subject, progress)?))
}

/// How something is measured: it is given what to call with the number of rows that comes next.
pub(crate) type Measure<'a> = dyn FnMut(&mut dyn FnMut(usize)) -> anyhow::Result<Profile> + 'a;

/// The profile that is kept for all that `key` says, or else a measured one, which is kept from then on.
pub(crate) fn kept(
    key: String,
    freshness: Freshness,
    measure: &mut Measure<'_>,
) -> anyhow::Result<Profile> {
    let kept = Kept::of(key);
    if let (Freshness::Kept, Some(kept)) = (freshness, &kept) {
        match kept.read() {
            Ok(Some(profile)) => return Ok(profile),
            Ok(None) => {}
            Err(error) => eprintln!("note: {error:#}; measuring again"),
        }
    }
    let measured = measure(&mut |rows| {
        output::progress(&format!("measuring this machine: {rows} rows .."));
    });
    output::progress_done();
    let profile = measured?;
    if let Some(kept) = &kept {
        // Whoever cannot keep it measures again next time.
        let _ = kept.write(&profile);
    }
    Ok(profile)
}

/// Rows that are measured. One measurement is for all contexts, those included that are shorter than a usual batch.
pub(crate) fn measured_batch(loaded: &Loaded) -> usize {
    loaded.batch.max(spanker_plan::USUAL_BATCH as usize)
}

/// All that a measurement of cards that are threads of this process depends on.
fn threads_key(loaded: &Loaded, layout: &Layout, threads: usize) -> String {
    format!("{}; inproc", key(loaded.network.model(), layout, measured_batch(loaded), threads))
}

/// All that a measurement depends on, in one line.
pub(crate) fn key(model: &Model, layout: &Layout, batch: usize, threads: usize) -> String {
    let nameless = Model { name: String::new(), ..model.clone() };
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
        memory_of_machine(),
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

/// The processor by its name and numbers, as the system lists them.
fn processor(listed: &str) -> String {
    let value = |name: &str| {
        let mut lines = listed.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.trim() == name).map_or("?", |(_, value)| value.trim()).to_owned()
    };
    let names = ["model name", "cpu family", "model", "stepping", "cache size"];
    names.map(value).join(", ")
}

/// What the system has, or lets this process have.
pub(crate) fn memory_of_machine() -> u64 {
    let listed = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").unwrap_or_default();
    memory(&listed, &limit)
}

fn memory(listed: &str, limit: &str) -> u64 {
    let total = listed.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let total = total.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let total = total.map_or(UNKNOWN_MEMORY, |kibibytes| kibibytes.saturating_mul(1024));
    limit.trim().parse().map_or(total, |limit: u64| total.min(limit))
}

/// A profile in the user's cache.
struct Kept {
    path: PathBuf,
    key: String,
}

impl Kept {
    /// Where the profile for a key is kept; without a folder nothing is, and everything is measured again.
    fn of(key: String) -> Option<Kept> {
        models::cache().ok().map(|cache| Kept::new(&cache.join("profiles"), key))
    }

    fn new(folder: &Path, key: String) -> Kept {
        let name = format!("{:016x}.toml", fingerprint(key.bytes()));
        Kept { path: folder.join(name), key }
    }

    /// The profile, if there is one.
    fn read(&self) -> anyhow::Result<Option<Profile>> {
        if !self.path.exists() {
            return Ok(None);
        }
        let shown = || self.path.display().to_string();
        let text = files::read(&self.path, MOST_PROFILE)?;
        let first = text.lines().next().and_then(|line| line.strip_prefix("# "));
        anyhow::ensure!(first == Some(&self.key), "{}: not for this machine and model", shown());
        Profile::from_toml(&text).map(Some).with_context(shown)
    }

    fn write(&self, profile: &Profile) -> anyhow::Result<()> {
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        files::write(&self.path, &format!("# {}\n{}", self.key, profile.to_toml()))?;
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
    use spanker_model::{Quant, builtin};
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
        assert!(format!("{:#}", kept.read().unwrap_err()).contains("toml"));
        kept.write(&profile).unwrap();
        assert_eq!(kept.read().unwrap(), Some(profile));
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
    fn memory_is_what_the_system_has_or_a_limit_below_that() {
        let listed = "MemTotal:       24000000 kB\nMemFree:  1 kB\n";
        assert_eq!(memory(listed, "max\n"), 24_576_000_000);
        assert_eq!(memory(listed, "1000000\n"), 1_000_000);
        assert_eq!(memory(listed, "99000000000\n"), 24_576_000_000);
        assert_eq!(memory("", ""), UNKNOWN_MEMORY);
    }

    #[test]
    fn processor_is_named_with_its_numbers() {
        let listed = "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC\ncpu family : 25\n";
        assert_eq!(processor(listed), "AMD EPYC, 25, 17, ?, ?");
    }
}
