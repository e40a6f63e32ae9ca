// SPDX-License-Identifier: Apache-2.0
//! Compiles the C files of the tests against the ABI header. It is not a build
//! system: one source file in, one output file out, warnings are errors.

use std::path::Path;
use std::process::Command;

/// Compiles `source` to `output`, and panics with the compiler's words when that fails. A relative
/// path is one from `tests/`.
///
/// A machine without `cc` fails the test: the header would otherwise go unchecked in silence.
pub fn compile(source: impl AsRef<Path>, output: &Path, flags: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = source.as_ref();
    let result = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror"])
        .args(flags)
        .arg("-I")
        .arg(root.join("include"))
        .arg(root.join("tests").join(source))
        .arg("-o")
        .arg(output)
        .output();
    let source = source.display();
    let compiler = match result {
        Ok(compiler) => compiler,
        Err(error) => panic!("cannot run `cc` on {source}, install a C compiler: {error}"),
    };
    assert!(
        compiler.status.success(),
        "cc rejects {source}: {}",
        String::from_utf8_lossy(&compiler.stderr)
    );
}
