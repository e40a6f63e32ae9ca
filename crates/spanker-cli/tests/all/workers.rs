// SPDX-License-Identifier: Apache-2.0
//! Workers as people start them: two processes on this machine, a leader, and what goes wrong between them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::scratch::Scratch;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const MODEL: &str = "synth llama --layers 4 --hidden 128 --heads 4 --kv-heads 4 --ffn 192 --vocab 300 --context 2048 \
     --quant q4_0 --out x.gguf";
/// Longer than anything here takes.
const SOON: Duration = Duration::from_secs(120);

/// A worker at work.
struct Working {
    child: Child,
    lines: Receiver<String>,
    address: String,
    seen: Vec<String>,
}

impl Working {
    /// A worker with a cache of its own, by its name.
    fn start(scratch: &Scratch, cache: &str, flags: &str) -> Working {
        Working::at(scratch, cache, "127.0.0.1:0", flags)
    }

    fn at(scratch: &Scratch, cache: &str, listen: &str, flags: &str) -> Working {
        let mut command = scratch.command();
        command.env("SPANKER_CACHE", scratch.path().join(cache));
        command.args(["worker", "--threads", "1", "--listen", listen]);
        command.args(flags.split_whitespace());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command starts");
        let errors = BufReader::new(child.stderr.take().expect("a pipe"));
        let (said, lines) = channel();
        std::thread::spawn(move || {
            for line in errors.lines().map_while(Result::ok) {
                if said.send(line).is_err() {
                    return;
                }
            }
        });
        let mut working = Working { child, lines, address: String::new(), seen: Vec::new() };
        let first = working.hears("listening on ");
        working.address = first.trim_start_matches("listening on ").to_owned();
        working
    }

    /// The next line with this text.
    fn hears(&mut self, text: &str) -> String {
        let until = Instant::now() + SOON;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if line.contains(text) {
                        return line;
                    }
                }
                Err(_) => panic!("no '{text}' in {:#?}", self.seen),
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a process");
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn scratch() -> Scratch {
    let scratch = Scratch::new(&[]);
    scratch.text(MODEL);
    scratch
}

fn workers(list: &[&Working]) -> String {
    list.iter().map(|worker| worker.address.as_str()).collect::<Vec<_>>().join(",")
}

/// What a run is asked for.
const ASK: &str = "run -m x.gguf -p abc --temp 0 --ignore-eos --threads 1 --split gather";

/// The text on one card of this process.
fn expected(scratch: &Scratch, tokens: usize) -> Value {
    scratch.json(&format!("{ASK} --fabric inproc -n {tokens}"))["tokens"].take()
}

/// A run that is under way.
fn begin(scratch: &Scratch, line: &str) -> Child {
    let mut command = scratch.command();
    command.args(line.split_whitespace());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the command starts")
}

/// Waits for some text, calls `harm`, and returns the whole text and what was said.
fn harmed(mut child: Child, harm: impl FnOnce()) -> (Vec<u8>, String) {
    let mut errors = child.stderr.take().expect("a pipe");
    let said = std::thread::spawn(move || {
        let mut said = String::new();
        errors.read_to_string(&mut said).expect("text");
        said
    });
    let mut text = vec![0; 60];
    let mut out = child.stdout.take().expect("a pipe");
    let begun = out.read_exact(&mut text);
    if begun.is_ok() {
        harm();
    }
    out.read_to_end(&mut text).expect("text");
    let status = child.wait().expect("an end");
    let said = said.join().expect("no panic");
    assert!(begun.is_ok() && status.success(), "{said}");
    (text, said)
}

#[test]
fn two_workers_without_the_file_give_the_tokens_of_one_card_and_get_the_weights_once() {
    let scratch = scratch();
    let expected = expected(&scratch, 12);
    let mut one = Working::start(&scratch, "one", "");
    let mut two = Working::start(&scratch, "two", "-m x.gguf");
    let on = format!("--fabric tcp --workers {}", workers(&[&one, &two]));
    let found = scratch.json(&format!("{ASK} {on} -n 12"));
    assert_eq!(found["tokens"], expected, "{found}");
    one.hears("x.gguf from the cache and the leader");
    let left = one.hears("done; ");
    assert!(!left.contains("no weights"), "{left}");
    two.hears("x.gguf from a file of this machine");
    two.hears("done; no weights came over the network");
    // The same again, and after a restart of the worker: it has what it needs.
    let again = scratch.json(&format!("{ASK} {on} -n 12"));
    assert_eq!(again["tokens"], expected);
    one.hears("done; no weights came over the network");
    drop(one);
    let mut one = Working::start(&scratch, "one", "");
    let on = format!("--workers {}", workers(&[&one, &two]));
    assert_eq!(scratch.json(&format!("{ASK} {on} -n 12"))["tokens"], expected);
    one.hears("done; no weights came over the network");
    let text = scratch.text(&format!("verify -m x.gguf --threads 1 {on} -n 4 --ctx-size 64"));
    assert!(text.contains("identical on 3 cards"), "{text}");
    // What people and programs see of them.
    let listed = scratch.text(&format!("workers {on}"));
    assert!(listed.contains("free") && listed.contains("of x.gguf"), "{listed}");
    let json = scratch.text(&format!("workers {on} --json"));
    let first: Value = serde_json::from_str(json.lines().next().expect("a line")).expect("JSON");
    assert_eq!((&first["answers"], &first["threads"]), (&true.into(), &1.into()), "{first}");
    assert!(first["cached"][0]["held"].as_u64() > Some(0), "{first}");
}

#[test]
fn plan_answers_for_every_set_of_machines_before_weights_are_sent() {
    let scratch = Scratch::new(&[]);
    scratch.text(
        "synth llama --layers 4 --hidden 256 --heads 4 --kv-heads 4 --ffn 704 --vocab 512 --context 512 --quant q8_0 \
         --out x.gguf",
    );
    let mut one = Working::start(&scratch, "one", "");
    let on = format!("--workers {}", one.address);
    let text = scratch.text(&format!("plan x.gguf {on} --threads 1 --ctx-size 256 --explain"));
    assert!(text.contains("machines") && text.contains("best: this machine"), "{text}");
    assert!(text.contains(&format!("this machine + {}", one.address)), "{text}");
    let left = one.hears("done; ");
    // What comes before the weights is in one chunk.
    assert!(left.contains("1.0 MB of weights"), "{left}");
    let json = scratch.json(&format!("plan x.gguf {on} --threads 1 --ctx-size 256"));
    assert_eq!(json["machines"]["sets"].as_array().map(Vec::len), Some(2), "{json}");
}

#[test]
fn worker_that_is_killed_or_stopped_in_an_answer_is_named_and_the_text_is_the_same() {
    let scratch = scratch();
    let expected = scratch.run(&format!("{ASK} --fabric inproc -n 900")).stdout;
    for signal in [Signal::KILL, Signal::STOP] {
        let mut one = Working::start(&scratch, "one", "-m x.gguf");
        let two = Working::start(&scratch, "two", "-m x.gguf");
        // One that is killed is noticed without a deadline.
        let deadline = if signal == Signal::STOP { "5s" } else { "20s" };
        let on = format!("--fabric tcp --workers {} --deadline {deadline}", workers(&[&one, &two]));
        let run = begin(&scratch, &format!("{ASK} {on} -n 900"));
        let (found, said) = harmed(run, || one.signal(signal));
        assert_eq!(found, expected, "{signal:?}: {said}");
        assert!(said.contains(&format!("is worker {}", one.address)), "{signal:?}: {said}");
        assert!(said.contains("going on with cards 0,2"), "{signal:?}: {said}");
        if signal == Signal::STOP {
            // It finds that the group is over, and waits for the next leader.
            one.signal(Signal::CONT);
            one.hears("waiting for the next leader");
            let again = scratch.json(&format!("{ASK} {on} -n 5"));
            assert_eq!(again["tokens"], self::expected(&scratch, 5));
        }
    }
}

#[test]
fn leader_that_is_killed_leaves_workers_that_wait_for_the_next() {
    let scratch = scratch();
    let expected = expected(&scratch, 8);
    let mut one = Working::start(&scratch, "one", "-m x.gguf");
    let on = format!("--workers {}", one.address);
    let mut run = begin(&scratch, &format!("{ASK} {on} -n 1900"));
    run.stdout.take().expect("a pipe").read_exact(&mut [0; 20]).expect("some text");
    run.kill().expect("a process");
    run.wait().expect("an end");
    one.hears("waiting for the next leader");
    assert_eq!(scratch.json(&format!("{ASK} {on} -n 8"))["tokens"], expected);
    // And it ends in order.
    one.signal(Signal::TERM);
    assert_eq!(one.child.wait().expect("an end").code(), Some(0));
}

#[test]
fn wrong_keys_and_none_beyond_this_machine_are_refused_with_advice() {
    let scratch = scratch();
    scratch.text("key new right");
    scratch.text("key new --out wrong");
    let one = Working::start(&scratch, "one", "--key-file right");
    let on = format!("--workers {}", one.address);
    for (key, code) in [("--key-file wrong", 1), ("", 1)] {
        let said = scratch.error(code, &format!("{ASK} {on} {key} -n 2 --json"));
        assert!(said.contains("refused the handshake") && said.contains("hint: "), "{said}");
    }
    let found = scratch.json(&format!("{ASK} {on} --key-file right -n 4"));
    assert_eq!(found["tokens"], expected(&scratch, 4));
    let said = scratch.error(2, "worker --listen 0.0.0.0:0");
    assert!(said.contains("a key is needed") && said.contains("spanker key new"), "{said}");
    let said = scratch.error(2, &format!("{ASK} --workers 192.0.2.1:7077 -n 2 --json"));
    assert!(said.contains("a key is needed"), "{said}");
    let said = scratch.error(2, "key new right");
    assert!(said.contains("right") && said.contains("exists"), "{said}");
    let said = scratch.error(2, &format!("{ASK} --fabric tcp -n 2 --json"));
    assert!(said.contains("no workers are named") && said.contains("SPANKER_WORKERS"), "{said}");
    let said = scratch.error(2, &format!("{ASK} --fabric inproc {on} -n 2"));
    assert!(said.contains("are for --fabric tcp"), "{said}");
}

#[test]
fn worker_that_is_not_there_is_named() {
    let scratch = scratch();
    // A port that nobody has.
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr();
    let free = free.expect("an address");
    let said = scratch.error(1, &format!("{ASK} --workers {free} -n 2 --json"));
    assert!(said.contains(&free.to_string()) && said.contains("hint: "), "{said}");
    let output = scratch.run(&format!("workers --workers {free}"));
    assert_eq!(output.status.code(), Some(1));
}

/// A server at work.
struct Serving {
    child: Child,
    address: String,
}

impl Serving {
    fn start(scratch: &Scratch, flags: &str) -> Serving {
        let mut command: Command = scratch.command();
        command.args(["serve", "-m", "x.gguf", "--port", "0"]).args(flags.split_whitespace());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command starts");
        let mut errors = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut said = String::new();
        errors.read_line(&mut said).expect("a line");
        let address = said.strip_prefix("listening on ").and_then(|rest| rest.split(';').next());
        let address = address.unwrap_or_else(|| panic!("{said}")).to_owned();
        // Nobody reads the rest, and the server must not stop for that.
        std::thread::spawn(move || std::io::copy(&mut errors, &mut std::io::sink()));
        let serving = Serving { child, address };
        within("the model", || serving.get("/health").starts_with("HTTP/1.1 200"));
        serving
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.set_read_timeout(Some(SOON)).expect("a timeout");
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all((head + body).as_bytes()).expect("a server that reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }

    fn get(&self, path: &str) -> String {
        self.ask("GET", path, "")
    }

    fn json(&self, method: &str, path: &str, body: &str) -> Value {
        let answer = self.ask(method, path, body);
        serde_json::from_str(answer.split_once("\r\n\r\n").expect("a body").1).expect("JSON")
    }

    fn status(&self) -> Value {
        self.json("GET", "/status", "")
    }

    fn text(&self, tokens: usize) -> Value {
        let body = format!(
            "{{\"prompt\": \"abc\", \"max_tokens\": {tokens}, \"temperature\": 0, \"ignore_eos\": true}}"
        );
        self.json("POST", "/v1/completions", &body)["choices"][0]["text"].take()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn within(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < end, "{what} did not come to be");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn server_goes_on_without_a_worker_and_takes_it_in_when_it_is_back() {
    let scratch = scratch();
    let one = Working::start(&scratch, "one", "-m x.gguf");
    let two = Working::start(&scratch, "two", "-m x.gguf");
    let on = format!(
        "--workers {} --deadline 20s --threads 1 --split gather --ctx-size 512 --parallel 2",
        workers(&[&one, &two])
    );
    let serving = Serving::start(&scratch, &on);
    let expected = serving.text(60);
    let address = one.address.clone();
    let serving_cards = |status: &Value| {
        let cards = status["cards"].as_array().expect("cards");
        cards.iter().filter(|card| card["state"] == "serving").count()
    };
    assert_eq!(serving_cards(&serving.status()), 3, "{}", serving.status());
    drop(one);
    assert_eq!(serving.text(60), expected);
    assert_eq!(serving.status()["cards_lost"], 1, "{}", serving.status());
    let _one = Working::at(&scratch, "one", &address, "-m x.gguf");
    within("the worker", || serving.status()["cards_back"] == 1);
    assert_eq!(serving.text(60), expected);
    assert_eq!(serving.status()["failed"], 0, "{}", serving.status());
}
