// SPDX-License-Identifier: Apache-2.0
//! Files: read whole with a bound, written whole or not at all.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::error::{EngineError, Result};

/// Reads a text of at most `most` bytes.
///
/// # Errors
/// [`EngineError::Io`] and [`EngineError::File`], which name the path.
pub fn read(path: &Path, most: u64) -> Result<String> {
    let shown = path.display();
    let file = File::open(path).map_err(|error| EngineError::io(format!("open {shown}"), error))?;
    let mut bytes = Vec::new();
    // One byte more than allowed, to tell a file that is too large; devices have no length.
    let read = file.take(most + 1).read_to_end(&mut bytes);
    read.map_err(|error| EngineError::io(format!("read {shown}"), error))?;
    if bytes.len() as u64 > most {
        return Err(EngineError::file(path, format_args!("more than {most} bytes")));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        EngineError::file(path, format_args!("byte {at} is not text in UTF-8"))
    })
}

/// Refuses a path that cannot be written, before the work begins whose result goes there: its folder is missing, it is
/// a folder or something else that is no file, or nothing can be written there.
///
/// # Errors
/// [`EngineError::Request`] with the reason.
pub fn check_output(path: &Path) -> Result<()> {
    let failed = |error: &dyn std::fmt::Display| {
        EngineError::request(format!("cannot write {}: {error}", path.display()))
    };
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        return Err(failed(&format_args!("there is no folder {}", folder.display())));
    }
    if path.exists() {
        let writable = rustix::fs::access(path, rustix::fs::Access::WRITE_OK);
        writable.map_err(|error| failed(&io::Error::from(error)))?;
    }
    // What is sure to tell is to begin such a file; it goes away again.
    Draft::new(path).map(drop).map_err(|error| failed(&error))
}

/// [`check_output`] for every path that is given.
///
/// # Errors
/// As [`check_output`].
pub fn check_outputs<'a>(paths: impl IntoIterator<Item = &'a Option<PathBuf>>) -> Result<()> {
    paths.into_iter().flatten().try_for_each(|path| check_output(path))
}

/// Writes `bytes` so that `path` has all of them or is as it was: to a file beside it that then takes
/// its name.
///
/// # Errors
/// [`EngineError::Io`], which names the path.
pub fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    let written = Draft::new(path).and_then(|mut draft| {
        draft.file().write_all(bytes.as_ref())?;
        draft.finish()
    });
    written.map_err(|error| EngineError::io(format!("write {}", path.display()), error))
}

/// A file that is being written beside the one whose name it takes when it is complete. Until then it
/// is removed when dropped.
#[derive(Debug)]
pub struct Draft {
    file: File,
    beside: PathBuf,
    target: PathBuf,
}

/// Names that are tried for a draft.
const DRAFTS: u32 = 100;

impl Draft {
    /// Begins the file that becomes `path`.
    ///
    /// # Errors
    /// What the system says, or why `path` can be no file.
    pub fn new(path: &Path) -> io::Result<Draft> {
        let refused = |why: &str| Err(io::Error::other(why));
        // A link stays a link: what it points to is replaced.
        let target = match fs::metadata(path) {
            Ok(existing) if !existing.is_file() => {
                return refused("it exists and is not a regular file");
            }
            Ok(_) => fs::canonicalize(path)?,
            Err(_) => path.to_path_buf(),
        };
        let Some(name) = target.file_name() else { return refused("it names no file") };
        // A process of the same number may have been killed while it wrote.
        for attempt in 0..DRAFTS {
            let mut beside = name.to_os_string();
            beside.push(format!(".{}-{attempt}.tmp", std::process::id()));
            let beside = target.with_file_name(beside);
            match File::create_new(&beside) {
                Ok(file) => return Ok(Draft { file, beside, target }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        refused(&format!("{DRAFTS} unfinished files of that name are in the way"))
    }

    /// The file to write to.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Gives the file its name, once it is safe on the disk.
    ///
    /// # Errors
    /// What the system says.
    pub fn finish(self) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.beside, &self.target)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After it has its name there is nothing here, and nothing can be done about a file that cannot be
        // removed.
        let _ = fs::remove_file(&self.beside);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_whole_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.toml");
        write(&path, "one").unwrap();
        write(&path, "two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(names(folder.path()), ["a.toml"]);
    }

    #[test]
    fn a_folder_in_the_way_is_named_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taken");
        fs::create_dir(&path).unwrap();
        let error = format!("{:#}", write(&path, "text").unwrap_err());
        assert!(error.contains("taken") && error.contains("not a regular file"), "{error}");
        assert_eq!(names(folder.path()), ["taken"]);
    }

    #[test]
    fn outputs_that_cannot_be_written_are_refused_and_others_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("a.json");
        fs::write(&there, "old").unwrap();
        check_output(&there).unwrap();
        check_output(&folder.path().join("new.json")).unwrap();
        assert_eq!(
            (names(folder.path()), fs::read_to_string(&there).unwrap()),
            (vec!["a.json".into()], "old".into())
        );
        for (path, why) in [
            (folder.path().to_path_buf(), "not a regular file"),
            (folder.path().join("none/a.json"), "there is no folder"),
            (there.join("b.json"), "there is no folder"),
            (PathBuf::from("/proc/a.json"), "/proc/a.json"),
            (PathBuf::new(), "no file"),
        ] {
            let error = check_output(&path).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(&path.display().to_string()), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        write(&link, "new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
    }

    #[test]
    fn too_much_and_what_is_no_text_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        fs::write(&path, b"12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), "12345");
        assert!(read(&path, 4).unwrap_err().to_string().contains("a.csv: more than 4 bytes"));
        fs::write(&path, b"12\xff").unwrap();
        assert!(read(&path, 4).unwrap_err().to_string().contains("byte 2 is not text"));
    }
}
