// SPDX-License-Identifier: Apache-2.0
//! `spanker serve` as a user starts and ends it: where it listens, what it refuses, signals.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use crate::place::Place;
use crate::scratch::Scratch;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const MODEL: &str = "synth llama --layers 2 --hidden 64 --heads 2 --kv-heads 2 --ffn 96 --vocab 300 --context 4096 \
     --quant q8_0 --out x.gguf";

/// A server at work.
struct Serving {
    child: Child,
    errors: BufReader<ChildStderr>,
    address: String,
    said: String,
}

impl Serving {
    fn start(scratch: &Scratch, flags: &str) -> Serving {
        Serving::of(scratch.command(), flags)
    }

    /// The same by a command that is given.
    fn of(mut command: Command, flags: &str) -> Serving {
        command.args(["serve", "-m", "x.gguf", "--port", "0"]).args(flags.split_whitespace());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command starts");
        let mut errors = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut said = String::new();
        errors.read_line(&mut said).expect("a line");
        let address = said.strip_prefix("listening on ").and_then(|rest| rest.split(';').next());
        let address = address.unwrap_or_else(|| panic!("{said}")).to_owned();
        let serving = Serving { child, errors, address, said };
        within(|| serving.status("GET", "/health", "") == 200);
        serving
    }

    /// A connection over which a request has gone.
    fn ask(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all((head + body).as_bytes()).expect("a server that reads");
        stream
    }

    fn status(&self, method: &str, path: &str, body: &str) -> u16 {
        let mut stream = BufReader::new(self.ask(method, path, body));
        let mut line = String::new();
        stream.read_line(&mut line).expect("an answer");
        line.split(' ').nth(1).expect("a status").parse().expect("a number")
    }

    fn body(&self, path: &str) -> Value {
        let mut text = String::new();
        self.ask("GET", path, "").read_to_string(&mut text).expect("an answer");
        serde_json::from_str(text.split_once("\r\n\r\n").expect("a body").1).expect("JSON")
    }

    /// Answers that are under way.
    fn running(&self) -> u64 {
        self.body("/status")["running"].as_u64().expect("a number")
    }

    /// Sends a signal.
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a process");
    }

    /// The exit code, and what was said on standard error since the first line.
    fn end(mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        self.errors.read_to_string(&mut rest).expect("text");
        (self.child.wait().expect("an end").code(), rest)
    }
}

fn within(mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "it did not come to be");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn scratch() -> Scratch {
    let scratch = Scratch::new(&[("keys", "one\n\n two \n"), ("empty", "\n")]);
    scratch.text(MODEL);
    scratch
}

#[test]
fn server_says_where_it_listens_and_ends_in_order_when_it_is_told_to() {
    let scratch = scratch();
    for (signal, flags) in
        [(Signal::INT, ""), (Signal::TERM, "--cards 2 --alias small --parallel 3 --ctx-size 512")]
    {
        let serving = Serving::start(&scratch, flags);
        assert!(
            serving.said.contains(&format!("the page is http://{}/", serving.address)),
            "{}",
            serving.said
        );
        let name = if flags.is_empty() { "x" } else { "small" };
        assert_eq!(serving.body("/v1/models")["data"][0]["id"], name);
        let status = serving.body("/status");
        if !flags.is_empty() {
            assert_eq!((&status["parallel"], &status["context"]), (&3.into(), &512.into()));
        }
        assert_eq!(
            serving.status("POST", "/v1/completions", "{\"prompt\": \"x\", \"max_tokens\": 3}"),
            200
        );
        serving.signal(signal);
        let (code, said) = serving.end();
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("ending"), "{said}");
    }
}

/// What a plan says that a server would do, as the server says it.
fn planned(scratch: &Scratch, flags: &str) -> Value {
    let plan = scratch.json(&format!(
        "plan x.gguf {flags} --ctx-size 512 --objective throughput --concurrency 6"
    ));
    plan["serve"].clone()
}

#[test]
fn plans_for_load_are_what_the_server_does() {
    let scratch = scratch();
    let place = Place::new();
    let same = |planned: &Value, flags: &str| {
        let mut command = scratch.command();
        command.env("SPANKER_DEV_DIR", &place.dir);
        let serving = Serving::of(command, &format!("{flags} --ctx-size 512 --parallel 6"));
        let status = serving.body("/status");
        for field in ["parallel", "context", "layout", "copies", "expected"] {
            assert_eq!(planned[field], status[field], "{flags}: {field}");
        }
        assert_eq!(planned["kv_blocks"], status["kv_blocks"]["total"], "{flags}");
        serving.signal(Signal::INT);
        assert_eq!(serving.end().0, Some(0));
    };
    for cards in [1, 2, 3] {
        let flags = format!("--fabric inproc --threads 1 --cards {cards}");
        same(&planned(&scratch, &flags), &flags);
    }
    // The cards' profiles are all that it takes.
    place.ok("up --cards 3 --profile rev-a --topology ring");
    same(&planned(&scratch, "--profile rev-a --cards 3 --topology ring"), "--fabric cards");
    place.ok("down");
    place.assert_nothing_is_left();
    // For other loads other plans: this is not the same by accident.
    let one = scratch.json(
        "plan x.gguf --profile rev-a --cards 3 --ctx-size 512 --objective throughput --concurrency 1",
    );
    assert_ne!(
        one["serve"]["expected"],
        planned(&scratch, "--profile rev-a --cards 3")["expected"]
    );
    assert_eq!(
        scratch.json("plan x.gguf --profile rev-a --objective throughput")["serve"],
        Value::Null
    );
}

#[test]
fn mixture_of_experts_gives_many_at_once_the_text_that_it_gives_one() {
    let scratch = Scratch::new(&[]);
    scratch.text(
        "synth qwen3moe --layers 2 --hidden 64 --heads 2 --kv-heads 1 --ffn 32 --vocab 300 --context 256 \
         --experts 5 --experts-used 2 --quant q8_0 --out x.gguf",
    );
    let serving = Serving::start(&scratch, "--cards 3 --parallel 4");
    let body = |prompt: &str| {
        format!("{{\"prompt\": \"{prompt}\", \"max_tokens\": 24, \"temperature\": 0}}")
    };
    let text = |mut stream: TcpStream| {
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let body = text.split_once("\r\n\r\n").expect("a body").1;
        let value: Value = serde_json::from_str(body).expect("JSON");
        value["choices"][0]["text"].as_str().expect("a text").to_owned()
    };
    let prompts = ["one", "two", "three", "four"];
    let ask = |prompt: &&str| serving.ask("POST", "/v1/completions", &body(prompt));
    let alone: Vec<String> = prompts.iter().map(|prompt| text(ask(prompt))).collect();
    let streams: Vec<TcpStream> = prompts.iter().map(ask).collect();
    let together: Vec<String> = streams.into_iter().map(text).collect();
    assert_eq!(together, alone);
    serving.signal(Signal::TERM);
    assert_eq!(serving.end().0, Some(0));
}

#[test]
fn answers_under_way_are_finished_and_a_second_signal_ends_at_once() {
    let scratch = scratch();
    let long = "{\"prompt\": \"x\", \"ignore_eos\": true, \"stream\": true}";
    let serving = Serving::start(&scratch, "--timeout 60s");
    let mut stream = serving.ask("POST", "/v1/completions", long);
    within(|| serving.running() > 0);
    serving.signal(Signal::TERM);
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    assert!(text.contains("[DONE]"), "{}", &text[text.len().saturating_sub(500)..]);
    assert_eq!(serving.end().0, Some(0));

    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let serving = Serving::start(&scratch, "--timeout 60s --parallel 1 --max-queue 20");
        let streams: Vec<_> =
            (0..12).map(|_| serving.ask("POST", "/v1/completions", long)).collect();
        within(|| serving.running() > 0);
        serving.signal(signal);
        within(|| serving.status("GET", "/health", "") == 503);
        serving.signal(signal);
        assert_eq!(serving.end().0, Some(code));
        drop(streams);
    }
}

#[test]
fn answers_that_take_longer_than_the_timeout_are_cut_off() {
    let scratch = scratch();
    let serving = Serving::start(&scratch, "--timeout 0s");
    let streams: Vec<_> = (0..6)
        .map(|_| {
            serving.ask(
                "POST",
                "/v1/completions",
                "{\"prompt\": \"x\", \"ignore_eos\": true, \"stream\": true}",
            )
        })
        .collect();
    within(|| serving.running() > 0);
    serving.signal(Signal::TERM);
    let mut whole = 0;
    for mut stream in streams {
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        whole += usize::from(text.contains("[DONE]"));
    }
    assert!(whole < 6);
    assert_eq!(serving.end().0, Some(0));
}

#[test]
fn models_of_other_families_than_llama_are_served() {
    let families = [
        "gemma3 --layers 7 --heads 5 --kv-heads 1 --window 20",
        "gemma2 --layers 3 --heads 6 --kv-heads 2 --window 20",
        "phi3 --layers 2 --heads 3 --kv-heads 3 --window 20",
        "granite --layers 2 --heads 6 --kv-heads 3",
        "smollm3 --layers 5 --heads 6 --kv-heads 2",
        "mistral --layers 2 --heads 6 --kv-heads 2 --window 20",
        "qwen2 --layers 2 --heads 5 --kv-heads 1",
        "qwen3 --layers 2 --heads 6 --kv-heads 3",
        "qwen2moe --layers 2 --heads 6 --kv-heads 2 --experts 5 --shared-ffn 96",
        "qwen3moe --layers 2 --heads 6 --kv-heads 2 --experts 7",
        "olmoe --layers 2 --heads 6 --kv-heads 2 --experts 5",
        "gpt-oss --layers 3 --heads 6 --kv-heads 2 --experts 5 --window 20",
    ];
    for family in families {
        let scratch = Scratch::new(&[]);
        scratch.text(&format!(
            "synth {family} --head-size 32 --hidden 96 --ffn 160 --vocab 300 --context 256 --quant q8_0 --out x.gguf"
        ));
        let serving = Serving::start(&scratch, "--ctx-size 128");
        let body = r#"{"prompt": "abcdefghijklmnopqrstuvwxyz0123456789", "max_tokens": 6}"#;
        assert_eq!(serving.status("POST", "/v1/completions", body), 200, "{family}");
        serving.signal(Signal::TERM);
        assert_eq!(serving.end().0, Some(0), "{family}");
    }
}

#[test]
fn keys_come_from_flags_and_files() {
    let scratch = scratch();
    let serving = Serving::start(&scratch, "--api-key three --api-key-file keys");
    assert_eq!(serving.status("GET", "/status", ""), 401);
    for key in ["one", "two", "three"] {
        let mut stream = TcpStream::connect(&serving.address).expect("a connection");
        let request = format!(
            "GET /status HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).expect("a server that reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        assert!(text.starts_with("HTTP/1.1 200"), "{key}: {text}");
    }
    serving.signal(Signal::TERM);
    assert_eq!(serving.end().0, Some(0));
}

#[test]
fn requests_that_make_no_sense_are_exit_code_2_and_say_what_would() {
    let scratch = scratch();
    for (flags, said) in [
        ("--host 0.0.0.0", "hint: --api-key-file"),
        ("--parallel 0", "--parallel 0"),
        ("--tls-cert x.pem", "--tls-key"),
        ("--ctx-size 9999", "--ctx-size 9999"),
        ("--batch-size 0", "--batch-size 0"),
        ("--timeout soon", "as in 500ms"),
        ("--cors example.org", "example.org"),
        ("--api-key-file empty", "no key"),
        ("--kv-memory lots", "lots"),
        ("--audit 0.5", "--audit 0.5"),
        ("--cards 0,1", "--cards"),
    ] {
        let error = scratch.error(2, &format!("serve -m x.gguf --port 0 {flags}"));
        assert!(error.contains(said), "{flags}: {error}");
    }
    let error = scratch.error(1, "serve -m none.gguf --port 0");
    assert!(error.contains("none.gguf") && !error.contains("listening"), "{error}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let error = scratch.error(1, &format!("serve -m x.gguf --port {port}"));
    assert!(error.contains(&format!("cannot listen at 127.0.0.1:{port}")), "{error}");
}
