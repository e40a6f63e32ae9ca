// SPDX-License-Identifier: Apache-2.0
//! Models in several files: opened by any part, and parts that are missing, mixed up, of another model, or hostile.

use std::fs;
use std::path::{Path, PathBuf};

use ggml_spanker::{GgufFile, Quant};
use spanker_model::gguf::{Field, Writer};

/// One part: what its header says of the split, and its tensors, rows of 8 numbers.
struct Part<'a> {
    no: Field<'a>,
    count: Field<'a>,
    tensors: Field<'a>,
    architecture: Option<&'a str>,
    names: &'a [&'a str],
    fill: f32,
}

impl Part<'_> {
    fn write(&self, path: &Path) {
        let mut writer = Writer::new();
        if let Some(architecture) = self.architecture {
            writer.put("general.architecture", Field::Text(architecture)).expect("a key");
        }
        writer.put("split.no", self.no).expect("a key");
        writer.put("split.count", self.count).expect("a key");
        writer.put("split.tensors.count", self.tensors).expect("a key");
        for name in self.names {
            writer.tensor(name, &[8], Quant::F32).expect("a tensor");
        }
        let mut file = fs::File::create(path).expect("a file");
        let bytes = self.fill.to_le_bytes().repeat(8);
        writer.write(&mut file, |_, out| out.write_all(&bytes)).expect("space");
    }
}

/// A part as it should be: number `no` from 0, of three with five tensors.
fn good<'a>(no: u32, names: &'a [&'a str]) -> Part<'a> {
    Part {
        no: Field::U32(no),
        count: Field::U32(3),
        tensors: Field::I32(4),
        architecture: (no == 0).then_some("llama"),
        names,
        fill: no as f32,
    }
}

fn name(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("big-{number:05}-of-00003.gguf"))
}

/// A model of three parts, the first of which has no tensors.
fn write(folder: &Path) {
    good(0, &[]).write(&name(folder, 1));
    good(1, &["a", "b", "c"]).write(&name(folder, 2));
    good(2, &["d"]).write(&name(folder, 3));
}

fn error(path: &Path) -> String {
    let error = GgufFile::open(path).expect_err("a bad model");
    let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
    format!("{error}{}", source.unwrap_or_default())
}

#[test]
fn any_part_opens_all_of_them() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path());
    for number in 1..=3 {
        let file = GgufFile::open(name(folder.path(), number)).expect("a sound model");
        assert_eq!(file.header().metadata()["general.architecture"].as_str(), Some("llama"));
        assert_eq!(file.header().tensors().len(), 4);
        for (tensor, part) in [("a", 1.0_f32), ("b", 1.0), ("c", 1.0), ("d", 2.0)] {
            let view = file.tensor(tensor).expect(tensor);
            assert_eq!(view.bytes, part.to_le_bytes().repeat(8), "{tensor}");
            let range = file.header().range(&file.header().tensors()[tensor]);
            assert_eq!((range.start, range.end), (view.offset, view.offset + 32));
            assert_eq!(view.bytes, &file.bytes()[range.start as usize..range.end as usize]);
        }
    }
}

#[test]
fn part_that_is_missing_or_cut_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path());
    let third = name(folder.path(), 3);
    let whole = fs::read(&third).expect("a file");
    for length in 0..whole.len() {
        fs::write(&third, &whole[..length]).expect("a file");
        let error = error(&name(folder.path(), 1));
        assert!(error.starts_with("part 'big-00003-of-00003.gguf': gguf: "), "{length}: {error}");
    }
    fs::remove_file(&third).expect("a file");
    let error = error(&name(folder.path(), 2));
    let start = format!("{}: open part 3 of 3: ", third.display());
    assert!(error.starts_with(&start), "{error}");
}

#[test]
fn parts_that_are_mixed_up_or_of_other_models_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |number| name(folder.path(), number);
    let check = |number, expected: &str| assert_eq!(error(&path(number)), expected);

    write(folder.path());
    good(2, &["d"]).write(&path(2));
    check(
        1,
        "part 'big-00002-of-00003.gguf': its header says part 3 of 3 (split.no, split.count), its name part 2 of 3",
    );
    check(
        2,
        "part 'big-00002-of-00003.gguf': its header says part 3 of 3 (split.no, split.count), its name part 2 of 3",
    );
    Part { count: Field::U32(4), ..good(1, &["a", "b", "c"]) }.write(&path(2));
    check(
        3,
        "part 'big-00002-of-00003.gguf': its header says part 2 of 4 (split.no, split.count), its name part 2 of 3",
    );
    Part { tensors: Field::I32(7), ..good(1, &["a", "b", "c"]) }.write(&path(2));
    check(1, "part 'big-00002-of-00003.gguf': split.tensors.count is 7, and 4 in another part");
    Part { architecture: Some("qwen2"), ..good(1, &["a", "b", "c"]) }.write(&path(2));
    check(
        1,
        "part 'big-00002-of-00003.gguf': general.architecture is 'qwen2', and 'llama' in the first part",
    );
    good(1, &["a", "d"]).write(&path(2));
    check(1, "part 'big-00003-of-00003.gguf': tensor 'd' is in another part as well");
    good(1, &["a", "b"]).write(&path(2));
    check(1, "gguf: metadata 'split.tensors.count': 4, and the 3 parts have 3");
    good(1, &["a", "b", "c", "e", "f"]).write(&path(2));
    check(
        1,
        "part 'big-00002-of-00003.gguf': split.tensors.count is 4, and with this part there are 5",
    );
    let mut whole = Writer::new();
    whole.put("general.architecture", Field::Text("llama")).expect("a key");
    fs::write(path(2), whole.header()).expect("a file");
    check(1, "part 'big-00002-of-00003.gguf': it has no split.count: it is no part of a model");
}

#[test]
fn part_of_another_name_is_refused_and_a_whole_file_is_no_part() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path());
    let other = folder.path().join("x.gguf");
    fs::copy(name(folder.path(), 2), &other).expect("a file");
    let error = error(&other);
    assert!(
        error.starts_with("part 'x.gguf': it is part 2 of 3 (split.no, split.count): "),
        "{error}"
    );
    assert!(error.ends_with("'-00002-of-00003.gguf'"), "{error}");
    // What joins parts leaves these, and a model may have one part.
    for count in [0, 1] {
        Part { count: Field::U32(count), ..good(0, &["a"]) }.write(&other);
        assert!(GgufFile::open(&other).expect("a model").tensor("a").is_some());
    }
}

#[test]
fn hostile_keys_of_parts_are_errors_that_name_key_and_value() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = name(folder.path(), 1);
    let first = || good(0, &["a"]);
    let cases = [
        (Part { count: Field::U64(u64::MAX), ..first() }, "split.count", "is more than 1024"),
        (Part { count: Field::I32(-3), ..first() }, "split.count", "Signed(-3) is no number"),
        (Part { count: Field::Text("3"), ..first() }, "split.count", "is no number from 0 to 1024"),
        (Part { no: Field::U32(3), ..first() }, "split.no", "3 is more than 2"),
        (Part { no: Field::F32(0.5), ..first() }, "split.no", "Float(0.5) is no number"),
        (Part { tensors: Field::I32(-1), ..first() }, "split.tensors.count", "Signed(-1)"),
        (
            Part { tensors: Field::U64(1 << 40), ..first() },
            "split.tensors.count",
            "is more than 65536",
        ),
    ];
    for (part, key, reason) in cases {
        part.write(&path);
        let error = error(&path);
        assert!(error.starts_with(&format!("gguf: metadata '{key}': ")), "{error}");
        assert!(error.contains(reason), "{error}");
    }
    let mut writer = Writer::new();
    writer.put("split.count", Field::U32(3)).expect("a key");
    fs::write(&path, writer.header()).expect("a file");
    assert_eq!(error(&path), "gguf: metadata 'split.tensors.count': missing");
}

#[test]
fn parts_with_changed_bytes_are_refused_or_within_their_bounds() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path());
    let paths: Vec<PathBuf> = (1..=3).map(|number| name(folder.path(), number)).collect();
    let whole: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).expect("a file")).collect();
    let mut state = 1_u32;
    let mut random = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % below
    };
    for _ in 0..500 {
        let part = random(3);
        let mut bytes = whole[part].clone();
        for _ in 0..=random(3) {
            let at = random(bytes.len());
            bytes[at] = random(256) as u8;
        }
        fs::write(&paths[part], &bytes).expect("a file");
        if let Ok(file) = GgufFile::open(&paths[random(3)]) {
            for (name, tensor) in file.header().tensors() {
                let view = file.tensor(name).expect("every tensor is within its part");
                assert_eq!(view.bytes.len() as u64, tensor.bytes);
            }
        }
        fs::write(&paths[part], &whole[part]).expect("a file");
    }
}
