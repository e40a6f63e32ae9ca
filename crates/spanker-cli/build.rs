// SPDX-License-Identifier: Apache-2.0
//! What `spanker --version` says beside the version: the commit of the checkout and the backends that were compiled in.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=SPANKER_COMMIT={}", commit().as_deref().unwrap_or("unknown"));
    let set = |name: &str| std::env::var_os(name).is_some();
    let with = match (set("CARGO_FEATURE_CUDA"), set("CARGO_FEATURE_MPI")) {
        (true, true) => "with cuda and mpi",
        (true, false) => "with cuda, without mpi",
        (false, true) => "with mpi, without cuda",
        (false, false) => "without cuda and mpi",
    };
    println!("cargo::rustc-env=SPANKER_BACKENDS={with}");
}

/// The commit of the checkout that this package lies in; nothing for sources that are no checkout of this project, also
/// if they lie somewhere in another one.
fn commit() -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().ok()?;
    let top = Path::new(&git(&["rev-parse", "--show-toplevel"])?).canonicalize().ok()?;
    if top != root {
        return None;
    }
    // What changes with a commit or another branch: where the head points, and the ref that it points to.
    let branch = git(&["rev-parse", "--symbolic-full-name", "HEAD"]);
    for name in ["HEAD", "logs/HEAD", "packed-refs"].into_iter().chain(branch.as_deref()) {
        let path = git(&["rev-parse", "--path-format=absolute", "--git-path", name]);
        // A path that is not there would have the package built again and again.
        if let Some(path) = path.filter(|path| Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let folder = env!("CARGO_MANIFEST_DIR");
    let output = Command::new("git").arg("-C").arg(folder).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned()).filter(|text| !text.is_empty())
}
