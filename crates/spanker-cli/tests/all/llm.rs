// SPDX-License-Identifier: Apache-2.0
//! `spanker run`, `chat` and `verify` as a user runs them on cards that are threads: text, reports, JSON,
//! traces, exit codes.

use std::fs;
use std::io::Write;
use std::process::{Output, Stdio};

use serde_json::Value;
use spanker_model::Quant;
use spanker_model::gguf::{Field, Header, Writer};

use crate::scratch::{Scratch, number};

/// A model whose heads, rows and blocks no number of cards divides.
const AWKWARD: &str = "synth llama --layers 2 --hidden 160 --heads 5 --kv-heads 5 --ffn 352 --vocab 300 \
     --context 128 --quant q4_0 --out x.gguf";

fn awkward() -> Scratch {
    let scratch = Scratch::new(&[]);
    scratch.text(AWKWARD);
    scratch
}

/// A run of words that may be empty or have spaces.
fn words(scratch: &Scratch, words: &[&str]) -> Output {
    scratch.command().args(words).output().expect("the command starts")
}

/// A model of zeros of any architecture and type, without a tokenizer.
fn zeros(architecture: &str, quant: Quant) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.put("general.architecture", Field::Text(architecture)).expect("a key");
    for (key, size) in [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 256),
        ("feed_forward_length", 256),
        ("attention.head_count", 4),
    ] {
        writer.put(&format!("{architecture}.{key}"), Field::U32(size)).expect("a key");
    }
    writer.tensor("token_embd.weight", &[256, 256], quant).expect("a tensor");
    writer.tensor("output_norm.weight", &[256], Quant::F32).expect("a tensor");
    for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
        let name = format!("blk.0.{name}.weight");
        writer.tensor(&name, &[256, 256], quant).expect("a tensor");
    }
    for name in ["attn_norm", "ffn_norm"] {
        writer.tensor(&format!("blk.0.{name}.weight"), &[256], Quant::F32).expect("a tensor");
    }
    let sizes: Vec<u64> = writer.tensors().iter().map(|(_, tensor)| tensor.bytes).collect();
    let mut file = Vec::new();
    writer.write(&mut file, |at, out| out.write_all(&vec![0; sizes[at] as usize])).expect("memory");
    file
}

#[test]
fn verify_of_an_awkward_model_holds_for_every_split_and_share() {
    let scratch = awkward();
    let text = scratch.text("verify -m x.gguf --cards 1..4 -n 4");
    // Two layers make no pipeline of three: that is left out, and said so where it is asked for.
    let counts = ["gather", "reduce", "pipeline", "mixed"].map(|name| text.matches(name).count());
    assert_eq!(counts, [4, 3, 1, 2], "{text}");
    assert_eq!(text.matches("identical\n").count(), 7, "{text}");
    assert_eq!(text.matches("repeats; logits within").count(), 3, "{text}");
    assert!(text.ends_with("identical on 1, 2, 3 and 4 cards\n"), "{text}");
    let error = scratch.error(2, "verify -m x.gguf --cards 3 --split pipeline");
    assert!(error.contains("3 stages for 2 layers"), "{error}");
    let text = scratch.text("verify -m x.gguf -ts 3,1 -n 4");
    assert!(text.contains("2 cards (3,1)") && !text.contains("FAIL"), "{text}");
    let text = scratch.text("verify -m x.gguf --cards 3..4 --split mixed -n 4 --json");
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 2);
    for (line, cards) in lines.iter().zip([3, 4]) {
        assert_eq!((&line["cards"], &line["split"]), (&cards.into(), &"mixed".into()));
        assert_eq!((&line["holds"], &line["strategy"]), (&true.into(), &"tensor-pipeline".into()));
    }
}

#[test]
fn mixtures_of_experts_say_the_same_on_any_number_of_cards() {
    let scratch = Scratch::new(&[]);
    let shape = "--layers 2 --hidden 160 --heads 5 --kv-heads 1 --head-size 32 --ffn 96 --vocab 300 --context 128";
    for (family, flags) in [
        ("qwen3moe", "--experts 7 --experts-used 3"),
        ("llama", "--experts 3 --experts-used 2"),
        ("qwen2moe", "--experts 5 --experts-used 1 --shared-ffn 64"),
    ] {
        scratch.text(&format!("synth {family} {shape} {flags} --quant q4_0 --out x.gguf"));
        let text = scratch.text("verify -m x.gguf --cards 1..5 --split gather -n 4");
        assert_eq!(text.matches("identical\n").count(), 5, "{family}: {text}");
        let text = scratch.text("verify -m x.gguf --cards 2 -n 4");
        assert!(!text.contains("FAIL"), "{family}: {text}");
        let run = "run -m x.gguf -p one --cards";
        let one = scratch.text(&format!("{run} 1 -n 9 --temp 0"));
        assert_eq!(scratch.text(&format!("{run} 4 -n 9 --temp 0 -t 2")), one, "{family}");
        let plan = scratch.text("plan x.gguf --cards 4 --json");
        assert!(plan.contains("\"fits\":true"), "{plan}");
    }
}

#[test]
fn verify_of_a_reduce_split_reports_its_distance_and_the_bound() {
    let scratch = awkward();
    let line = scratch.json("verify -m x.gguf --cards 3 --split reduce -n 4");
    assert_eq!((&line["holds"], &line["reason"]), (&true.into(), &Value::Null), "{line}");
    for (measure, bound) in [("most", "most"), ("rms", "rms")] {
        let distance = number(&line["distance"], measure);
        let bound = number(&line["bound"], bound);
        assert!(distance >= 0.0 && distance <= bound && bound > 0.0 && bound < 1.0, "{line}");
    }
    assert_eq!(line["distance"]["step"], line["bound"]["step"], "{line}");
    let line = scratch.json("verify -m x.gguf --cards 3 --split gather -n 4");
    assert_eq!((&line["distance"], &line["bound"]), (&Value::Null, &Value::Null), "{line}");
}

#[test]
fn verify_of_weights_that_are_not_numbers_fails_for_every_split_and_names_the_logit() {
    let scratch = awkward();
    let mut file = fs::read(scratch.path().join("x.gguf")).expect("a file");
    let header = Header::read(&file[..], file.len() as u64).expect("a header");
    let down = &header.tensors()["blk.1.ffn_down.weight"];
    let start = (header.data_offset() + down.offset) as usize;
    // The scale of the first block, which makes one element of every row of activations not a number.
    file[start..start + 2].copy_from_slice(&0x7E00u16.to_le_bytes());
    scratch.put("nan.gguf", &file);
    let output = scratch.run("verify -m nan.gguf --cards 2 -n 2");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let named = "step 0: the reference's logit of token 0 is NaN on 1 card\n";
    assert_eq!((text.matches("FAIL").count(), text.matches(named).count()), (3, 3), "{text}");
    let output = scratch.run("verify -m nan.gguf --cards 2 --split reduce -n 2 --json");
    let line: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&line["holds"], &line["reason"]), (&false.into(), &"not-finite".into()), "{line}");
}

/// What `chat` gives, fed with these lines.
fn chat(scratch: &Scratch, flags: &str, lines: &str) -> Output {
    let mut command = scratch.command();
    command.args(["chat", "-m", "x.gguf"]).args(flags.split_whitespace());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the command starts");
    child.stdin.take().expect("a pipe").write_all(lines.as_bytes()).expect("a reader");
    child.wait_with_output().expect("an end")
}

#[test]
fn every_answer_of_a_chat_is_beside_a_prediction() {
    let scratch = awkward();
    let output = chat(
        &scratch,
        "-n 4 --temp 0 -t 1",
        "it is a long and winding road to the sea\n/stats\nhi\n/stats\n",
    );
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let predicted: Vec<f64> = stderr
        .lines()
        .filter(|line| line.starts_with("prompt "))
        .filter_map(|line| line.split("predicted").nth(1)?.split_whitespace().next()?.parse().ok())
        .collect();
    assert!(matches!(predicted[..], [first, second] if 0.0 < first && 0.0 < second), "{stderr}");
}

#[test]
fn run_of_one_token_is_compared_and_traced() {
    let scratch = awkward();
    let json =
        scratch.json("run -m x.gguf -p hello -n 1 --temp 0 --cards 2 --compare --trace t.json");
    assert_eq!(json["tokens"].as_array().map(Vec::len), Some(1), "{json}");
    assert!(number(&json["compare"]["whole"], "predicted_ms") > 0.0, "{json}");
    assert!(scratch.read("t.json").contains("traceEvents"));
}

#[test]
fn input_that_cannot_be_read_ends_a_chat() {
    let scratch = awkward();
    let mut command = scratch.command();
    command.args(["chat", "-m", "x.gguf"]);
    let folder = fs::File::open(scratch.path()).expect("a folder");
    let output = command.stdin(folder).output().expect("the command starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert_eq!(errors.matches("cannot read standard input").count(), 1, "{errors}");
}

#[test]
fn report_that_nobody_reads_changes_no_exit_code() {
    let scratch = awkward();
    for line in [
        "run -m x.gguf -p hello -n 3 --cards 2 --compare",
        "run -m x.gguf -p hello -n -1 --ignore-eos",
    ] {
        let mut command = scratch.command();
        command.args(line.split_whitespace());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut running = command.spawn().expect("the command starts");
        drop(running.stderr.take());
        assert_eq!(running.wait().expect("it ends").code(), Some(0), "{line}");
    }
}

#[test]
fn run_prints_the_prompt_the_text_and_the_report() {
    let scratch = awkward();
    let output = scratch.run("run -m x.gguf -p hello -n 8 --temp 0 --cards 3");
    let (text, report) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let json = scratch.json("run -m x.gguf -p hello -n 8 --temp 0 --cards 3");
    let generated = json["text"].as_str().expect("text");
    // The text alone, so that it can be piped.
    assert_eq!(text, format!("hello{generated}\n"));
    for part in ["tensor-gather on 3 cards, wall time", "prompt          5 tokens", "generation"] {
        assert!(report.contains(part), "{part}: {report}");
    }
    for part in ["a token", "= compute", "+ sync", "bytes between cards", "predicted", "measured"] {
        assert!(report.contains(part), "{part}: {report}");
    }
    let silent = scratch.text("run -m x.gguf -p hello -n 8 --temp 0 --cards 3 --no-display-prompt");
    assert_eq!(silent, format!("{generated}\n"));
}

#[test]
fn run_as_json_has_every_field_and_the_text_does_not_depend_on_the_split() {
    let scratch = awkward();
    let one = scratch.json("run -m x.gguf -p hello -n 8 --temp 0");
    assert_eq!(
        (&one["version"], &one["cards"], &one["cards_lost"]),
        (&1.into(), &1.into(), &0.into())
    );
    assert_eq!((&one["clock"], &one["strategy"]), (&"wall".into(), &"one-card".into()));
    assert_eq!(one["tokens"].as_array().map(Vec::len), Some(8));
    assert_eq!((&one["ended"], &one["prompt"]["tokens"]), (&false.into(), &5.into()));
    assert_eq!(one["generation"]["tokens"], 7);
    for field in ["us", "tokens_per_second", "predicted_us"] {
        assert!(number(&one["prompt"], field) > 0.0, "{field}");
    }
    for field in ["tokens_per_second", "median_tokens_per_second", "predicted_tokens_per_second"] {
        assert!(number(&one["generation"], field) > 0.0, "{field}");
    }
    // Speeds and times have opposite signs, and agree.
    let tokens = &one["generation"];
    let (speed, time) = (number(tokens, "off_percent"), number(tokens, "time_off_percent"));
    assert!(((1.0 + speed / 100.0) * (1.0 + time / 100.0) - 1.0).abs() < 1e-9, "{one}");
    let off = number(&one["prompt"], "us") / number(&one["prompt"], "predicted_us") - 1.0;
    assert!((number(&one["prompt"], "time_off_percent") / 100.0 - off).abs() < 1e-9, "{one}");
    let token = &one["token"];
    assert!(number(token, "us") > 0.0 && number(token, "wall_us") > 0.0);
    assert_eq!(number(token, "bytes_sent"), 0.0);
    for flags in
        ["--cards 3", "-ts 3,1", "--cards 2 --split pipeline", "--cards 4 --split mixed -t 3 -b 2"]
    {
        let split = scratch.json(&format!("run -m x.gguf -p hello -n 8 --temp 0 {flags}"));
        assert_eq!((&split["text"], &split["tokens"]), (&one["text"], &one["tokens"]), "{flags}");
        assert!(number(&split["token"], "bytes_sent") > 0.0, "{flags}");
    }
}

#[test]
fn same_seed_gives_the_same_text_and_another_seed_another() {
    let scratch = awkward();
    let text = |seed: u32| {
        scratch.json(&format!("run -m x.gguf -p hello -n 12 --temp 1.5 --seed {seed}"))["text"]
            .clone()
    };
    let first = text(7);
    assert_eq!(text(7), first);
    assert_ne!(text(8), first);
}

#[test]
fn end_of_text_ends_a_run_unless_it_is_ignored() {
    let scratch = awkward();
    // All tokens are about as likely, so that the end comes by chance, which the seed decides.
    let flags = "--temp 50 --top-k 0 --top-p 1 --min-p 0 -n 100";
    let run = |seed: u32, more: &str| {
        scratch.json(&format!("run -m x.gguf -p hello {flags} --seed {seed} {more}"))
    };
    let (seed, ended) = (1..40)
        .map(|seed| (seed, run(seed, "")))
        .find(|(_, json)| json["ended"] == true)
        .expect("one of 40 runs of 100 tokens meets the end");
    let tokens = ended["tokens"].as_array().expect("tokens");
    assert!(tokens.len() < 100);
    let on = run(seed, "--ignore-eos");
    let all = on["tokens"].as_array().expect("tokens");
    assert_eq!((all.len(), &on["ended"]), (100, &false.into()));
    assert_eq!(all[..tokens.len()], tokens[..]);
    // The vocabulary has its marks last: the end, and the end of a turn.
    assert!([297, 299].contains(&all[tokens.len()].as_u64().expect("a token")));
}

#[test]
fn run_ends_where_the_context_is_full() {
    let scratch = awkward();
    let json = scratch.json("run -m x.gguf -p hello -n 100 --temp 0 --ctx-size 16 --ignore-eos");
    // The last token needs no place of its own.
    assert_eq!(json["tokens"].as_array().map(Vec::len), Some(16 - 5 + 1));
    let one = scratch.json("run -m x.gguf -p hello -n 1 --temp 0");
    assert_eq!(
        (one["tokens"].as_array().map(Vec::len), &one["generation"]["tokens"]),
        (Some(1), &0.into())
    );
}

#[test]
fn trace_of_a_run_is_json_with_marks_of_every_card() {
    let scratch = awkward();
    for (flags, cards) in [("--cards 3", 3), ("--cards 2 --split pipeline", 2)] {
        let output =
            scratch.run(&format!("run -m x.gguf -p hello -n 3 --temp 0 --trace t.json {flags}"));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && stderr.contains("saved t.json"), "{stderr}");
        let trace: Value = serde_json::from_str(&scratch.read("t.json")).expect("JSON");
        let events = trace["traceEvents"].as_array().expect("events");
        for card in 0..cards {
            let own = |event: &&Value| event["ph"] == "X" && event["tid"] == card;
            let marks: Vec<&Value> = events.iter().filter(own).collect();
            assert!(!marks.is_empty(), "card {card}, {flags}");
            assert!(
                marks.iter().all(|mark| number(mark, "dur") >= 0.0 && number(mark, "ts") >= 0.0)
            );
        }
    }
}

#[test]
fn chat_from_a_pipe_answers_every_line() {
    let scratch = awkward();
    let output = chat(&scratch, "-n 4 --temp 0 --cards 2 --seed 3", "hello\nand\n");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{errors}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.ends_with('\n') && text.matches('\n').count() >= 2, "{text:?}");
}

#[test]
fn chat_goes_on_after_empty_lines_wrong_commands_and_turns_that_do_not_fit() {
    let scratch = awkward();
    let long = "x".repeat(100);
    let typed =
        format!("hi\n\n/nope\n{long}\n/stats\n/save c.json\n/reset\n/save d.json\n/quit\nhi\n");
    let output = chat(&scratch, "-n 4 --temp 0 --ctx-size 64", &typed);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    for part in [
        "error: 2 lines could not be answered",
        "/nope: no such command",
        "too many for a context of 64",
        "tok/s",
        "2 turns",
    ] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    let saved: Value = serde_json::from_str(&scratch.read("c.json")).expect("JSON");
    assert_eq!((&saved[0]["role"], &saved[0]["content"]), (&"user".into(), &"hi".into()));
    assert_eq!((saved.as_array().map(Vec::len), &saved[1]["role"]), (Some(2), &"assistant".into()));
    assert_eq!(scratch.read("d.json").trim(), "[]");
}

#[test]
fn flags_that_make_no_sense_are_usage_errors_that_name_them() {
    let scratch = awkward();
    for (flags, parts) in [
        ("-p a --split sideways", &["sideways", "--split"][..]),
        ("-p a --cards 2 -ts 1,2,3", &["--tensor-split", "3 shares", "2 cards"]),
        ("-p a -ts 1,-1", &["-1"]),
        ("-p a -ts 1,x", &["x", "--tensor-split"]),
        ("-p a --ctx-size 0", &["--ctx-size 0"]),
        ("-p a --ctx-size 129", &["--ctx-size 129", "128"]),
        ("-p a -n 0", &["--n-predict 0"]),
        ("-p a --threads 0", &["--threads 0"]),
        ("-p a --batch-size 0", &["--batch-size 0"]),
        ("-p a --batch-size 513", &["--batch-size 513"]),
        ("-p a --cards 0", &["0", "--cards"]),
        ("-p a --cards 0,1", &["--cards", "--fabric"]),
        ("-p a --cards 257", &["--cards 257"]),
        ("-p a --temp -1", &["-1"]),
        ("-p a --top-p 2", &["2"]),
        ("-p a --cards 161", &["161 cards", "160 rows"]),
        ("-p a --cards 3 --split pipeline", &["3 stages", "2 layers"]),
        ("-p a --fabric nowhere", &["nowhere", "--fabric"]),
        ("-p a --deadline never", &["never", "--deadline"]),
        ("-p a --plan p.json --split gather", &["--plan", "--split"]),
        ("", &["--prompt"]),
    ] {
        let error = scratch.error(2, &format!("run -m x.gguf {flags}"));
        assert!(parts.iter().all(|part| error.contains(part)), "{flags}: {error}");
    }
    let output = words(&scratch, &["run", "-m", "x.gguf", "-p", ""]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), error.contains("the prompt has no tokens")), (Some(2), true));
    for (flags, part) in [
        ("--cards 0", "1 to 64"),
        ("--cards 3..1", "3..1"),
        ("--cards 1..x", "1..x"),
        ("--cards 1..3 -ts 1,1", "2 shares"),
        ("-n 0", "--n-predict 0"),
    ] {
        let error = scratch.error(2, &format!("verify -m x.gguf {flags}"));
        assert!(error.contains(part), "{flags}: {error}");
    }
}

#[test]
fn files_that_are_no_models_fail_and_are_named() {
    let scratch = awkward();
    let whole = fs::read(scratch.path().join("x.gguf")).expect("a file");
    scratch.put("half.gguf", &whole[..whole.len() / 2]);
    scratch.put("head.gguf", &whole[..1000]);
    scratch.put("text.gguf", b"this is no model, it is a text");
    scratch.put("empty.gguf", b"");
    scratch.put("gpt2.gguf", &zeros("gpt2", Quant::F16));
    scratch.put("q1.gguf", &zeros("llama", Quant::Q1_0));
    scratch.put("mute.gguf", &zeros("llama", Quant::F16));
    for (file, parts) in [
        ("half.gguf", &["tensor"][..]),
        ("head.gguf", &[]),
        ("text.gguf", &["GGUF"]),
        ("empty.gguf", &[]),
        ("gpt2.gguf", &["gpt2", "llama"]),
        ("q1.gguf", &["q1_0", "weight"]),
        ("mute.gguf", &["tokenizer"]),
        ("nothing.gguf", &["nothing.gguf"]),
    ] {
        for command in ["run -p hello", "verify", "chat"] {
            let error = scratch.error(1, &format!("{command} -m {file}"));
            let named = error.contains(file) && parts.iter().all(|part| error.contains(part));
            assert!(named, "{command} {file}: {error}");
        }
    }
}

#[test]
fn prompts_and_plans_that_do_not_fit_fail_and_say_the_numbers() {
    let scratch = awkward();
    let error = scratch.error(1, "run -m x.gguf -p abcdefgh --ctx-size 8");
    assert!(error.contains("8 tokens") && error.contains("hint: "), "{error}");
    let error = scratch.error(1, "verify -m x.gguf -p abcd --ctx-size 8 -n 5");
    assert!(error.contains("9 tokens do not fit a context of 8"), "{error}");
    scratch.text(&AWKWARD.replace("x.gguf", "y.gguf").replace("--ffn 352", "--ffn 384"));
    scratch.text("plan y.gguf --cards 2 --context 64 --out plan.json");
    let error = scratch.error(1, "run -m x.gguf -p hello --plan plan.json");
    assert!(error.contains("with ffn 384, the file has 352"), "{error}");
    let error = scratch.error(1, "run -m x.gguf -p hello --plan nothing.json");
    assert!(error.contains("nothing.json"), "{error}");
    scratch.put("bad.json", b"{\"kind\": \"plan\"");
    let error = scratch.error(1, "run -m x.gguf -p hello --plan bad.json");
    assert!(error.contains("bad.json"), "{error}");
}

#[test]
fn saved_plan_of_the_model_runs() {
    let scratch = awkward();
    scratch.text("plan x.gguf --cards 2 --context 64 --out plan.json");
    let planned = scratch.json("run -m x.gguf -p hello -n 4 --temp 0 --plan plan.json");
    let one = scratch.json("run -m x.gguf -p hello -n 4 --temp 0");
    assert_eq!(planned["tokens"].as_array().map(Vec::len), Some(4), "{planned}");
    // The plan was made for cards that are not here: what is predicted is for this machine.
    assert_eq!(planned["predicted_for"], "this-machine", "{planned}");
    if planned["strategy"] != "tensor-reduce" {
        assert_eq!(planned["text"], one["text"]);
    }
}

#[test]
fn plan_for_what_is_here_has_the_candidates_of_threads_and_its_layout_runs() {
    let scratch = awkward();
    let planned =
        scratch.json("plan x.gguf --fabric inproc --cards 2 --ctx-size 64 --out here.json");
    let best = &planned["candidates"][0];
    assert!(number(best, "tokens_per_second") > 0.0, "{planned}");
    let run = scratch.json("run -m x.gguf -p hello -n 4 --temp 0 --plan here.json");
    assert_eq!(run["predicted_for"], "this-machine", "{run}");
    let error = scratch.error(2, "plan x.gguf --fabric inproc --profile rev-a");
    assert!(error.contains("--fabric") && error.contains("--profile"), "{error}");
}

#[test]
fn reason_for_the_end_is_told_and_prompts_come_from_files() {
    let scratch = awkward();
    let json = scratch.json("run -m x.gguf -p hello -n 100 --temp 0 --ctx-size 16 --ignore-eos");
    assert_eq!(json["finish_reason"], "context", "{json}");
    let json = scratch.json("run -m x.gguf -p hello -n 3 --temp 0 --ignore-eos");
    assert_eq!((&json["finish_reason"], &json["ended"]), (&"length".into(), &false.into()));
    let whole = scratch.json("run -m x.gguf -p hello -n -1 --temp 0 --ctx-size 32 --ignore-eos");
    assert_eq!(whole["tokens"].as_array().map(Vec::len), Some(32 - 5 + 1), "{whole}");
    let error = scratch.error(2, "run -m x.gguf -p hello --trace /nowhere/t.json");
    assert!(error.contains("/nowhere"), "{error}");
    scratch.put("prompt.txt", b"hello");
    let from_file = scratch.json("run -m x.gguf -f prompt.txt -n 3 --temp 0 --ignore-eos");
    assert_eq!(from_file["text"], json["text"], "{from_file}");
}
