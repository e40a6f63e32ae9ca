// SPDX-License-Identifier: Apache-2.0
//! `#[path]` attributes that reach into another crate. What two crates share belongs into a crate that both use:
//! an included file is compiled twice, and its types are not the same.

use std::path::{Component, Path, PathBuf};

/// What a file includes from outside its crate. Names are paths from the root.
pub fn includes_of_other_crates(name: &str, text: &str) -> Vec<String> {
    let folder = Path::new(name).parent().unwrap_or(Path::new(""));
    let home = crate_of(Path::new(name));
    let paths = text.lines().filter_map(|line| {
        let (_, path) = line.trim_start().strip_prefix("#[path")?.split_once('"')?;
        Some(path.split_once('"')?.0)
    });
    let leaves = |path: &&str| crate_of(&normal(&folder.join(path))) != home;
    paths.filter(leaves).map(|path| format!("{name}: {path}")).collect()
}

/// `crates/NAME`, or the first folder for what is not among the crates.
fn crate_of(path: &Path) -> PathBuf {
    let depth = if path.starts_with("crates") { 2 } else { 1 };
    path.components().take(depth).collect()
}

/// The path without `..` where a folder is there to leave; there may be no such file.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir if normal.file_name().is_some() => {
                normal.pop();
            }
            part => normal.push(part),
        }
    }
    normal
}
