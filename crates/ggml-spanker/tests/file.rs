// SPDX-License-Identifier: Apache-2.0
//! GGUF files through the mapping: what is in them, and files that are cut, changed or no files.

use std::io::Write;

use ggml_spanker::{Error, GgufFile, Quant};
use proptest::prelude::*;
use tempfile::NamedTempFile;

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Two tensors: `a` of F32 with 2 rows of 3, and `b` of one block of Q8_0.
fn small() -> Vec<u8> {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend(2u64.to_le_bytes());
    file.extend(1u64.to_le_bytes());
    text(&mut file, "general.architecture");
    file.extend(8u32.to_le_bytes());
    text(&mut file, "llama");
    text(&mut file, "a");
    file.extend(2u32.to_le_bytes());
    file.extend([3u64, 2].iter().flat_map(|size| size.to_le_bytes()));
    file.extend(0u32.to_le_bytes());
    file.extend(0u64.to_le_bytes());
    text(&mut file, "b");
    file.extend(1u32.to_le_bytes());
    file.extend(32u64.to_le_bytes());
    file.extend(8u32.to_le_bytes());
    file.extend(32u64.to_le_bytes());
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend((0..6).flat_map(|value| (value as f32).to_le_bytes()));
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend((0..34).map(|byte: u8| byte));
    file
}

fn write(bytes: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("a folder for temporary files");
    file.write_all(bytes).expect("space for a small file");
    file
}

#[test]
fn tensors_of_a_sound_file_are_found_where_they_lie() {
    let bytes = small();
    let on_disk = write(&bytes);
    let file = GgufFile::open(on_disk.path()).expect("a sound file");
    assert_eq!(file.bytes(), bytes);
    let (a, b) = (file.tensor("a").expect("a"), file.tensor("b").expect("b"));
    assert_eq!((a.quant, a.dims, a.bytes.len()), (Quant::F32, &[3, 2][..], 24));
    assert_eq!(a.offset, file.header().data_offset());
    assert_eq!((b.quant, b.dims, b.offset), (Quant::Q8_0, &[32][..], a.offset + 32));
    assert_eq!(b.bytes, (0..34).collect::<Vec<u8>>());
    assert!(file.tensor("c").is_none());
}

#[test]
fn file_cut_at_any_length_is_refused() {
    let bytes = small();
    for len in 0..bytes.len() {
        let cut = write(&bytes[..len]);
        let error = GgufFile::open(cut.path()).expect_err("a file that is cut");
        assert!(matches!(error, Error::Model(_)), "cut at {len}: {error}");
    }
}

#[test]
fn what_is_no_file_is_refused_with_its_path() {
    let folder = tempfile::tempdir().expect("a folder");
    let error = GgufFile::open(folder.path()).expect_err("a folder");
    let path = folder.path().display();
    assert_eq!(error.to_string(), format!("{path}: open: not a regular file"));
    let error = GgufFile::open(folder.path().join("missing")).expect_err("nothing");
    assert!(error.to_string().starts_with(&format!("{path}/missing: open: ")), "{error}");
    let error = GgufFile::open("/dev/null").expect_err("a device");
    assert_eq!(error.to_string(), "/dev/null: open: not a regular file");
}

proptest! {
    #[test]
    fn file_with_changed_bytes_is_refused_or_within_its_bounds(
        changes in prop::collection::vec((0..400usize, any::<u8>()), 1..8),
    ) {
        let mut bytes = small();
        for (at, byte) in changes {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        let on_disk = write(&bytes);
        if let Ok(file) = GgufFile::open(on_disk.path()) {
            for (name, known) in file.header().tensors() {
                let view = file.tensor(name).expect("every tensor is within the file");
                prop_assert_eq!(view.bytes.len() as u64, known.bytes);
                prop_assert!(view.offset + known.bytes <= bytes.len() as u64);
            }
        }
    }
}

/// Says to a test of this file that it is the process that looks at a file which is cut short.
const CUT_SHORT: &str = "GGML_SPANKER_CUT_SHORT";

/// Runs this test's binary again, as the process that looks at what `text` names.
fn looking(text: &str) -> std::process::Output {
    let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "file_that_is_cut_short_ends_the_process_with_an_error"]);
    command.args(["--nocapture"]).env(CUT_SHORT, text).output().expect("it starts")
}

#[test]
fn file_that_is_cut_short_ends_the_process_with_an_error() {
    if let Ok(path) = std::env::var(CUT_SHORT) {
        // Another file, open and closed again, is not the one to blame.
        drop(GgufFile::open(format!("{path}.other")).expect("a good file"));
        let file = GgufFile::open(&path).expect("a good file");
        let cut = std::fs::File::options().write(true).open(&path).expect("the file");
        cut.set_len(0).expect("cut short");
        let sum: u64 = file.bytes().iter().map(|&byte| u64::from(byte)).sum();
        panic!("a file that is gone has the sum {sum}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cut.gguf");
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend([0; 16]);
    bytes.extend([7; 1 << 16]);
    std::fs::write(&path, &bytes).expect("a file");
    std::fs::write(folder.path().join("cut.gguf.other"), &bytes).expect("a file");
    let output = looking(path.to_str().expect("a name"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{:?}: {said}", output.status);
    let wanted = "cut.gguf: cut short or unreadable while it was in use";
    assert!(said.contains(wanted) && !said.contains("other"), "{said}");
}
