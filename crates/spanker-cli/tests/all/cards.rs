// SPDX-License-Identifier: Apache-2.0
//! `spanker cards`, `probe`, `bench --fabric cards` and `flight` on emulated cards, well and dead.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use ggml_spanker::{HostMatmul, MatmulInt4};
use rustix::process::Signal;
use serde_json::Value;
use spanker_engine::jobs::CardMatmul;
use spanker_fabric::device::Deadline;
use spanker_runtime::message::{Parsed, head, parse};
use spanker_runtime::{SpankerControl, abi};

use crate::place::{Place, SOON, pid, signal, within};

fn run(mut command: Command) -> Output {
    command.output().expect("the command starts")
}

/// What a command prints that succeeds.
fn text(place: &Place, line: &str) -> String {
    let output = run(place.spanker(line));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {errors}");
    String::from_utf8(output.stdout).expect("text")
}

fn json(place: &Place, line: &str) -> Value {
    serde_json::from_str(&text(place, line)).expect("JSON")
}

/// The rows of a bench, as JSON.
fn rows(place: &Place, line: &str) -> Vec<Value> {
    let all = text(place, &format!("bench {line} --fabric cards --json"));
    all.lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect()
}

/// What a command says that fails with this code.
fn error(place: &Place, code: i32, line: &str) -> String {
    let output = run(place.spanker(line));
    let errors = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
    errors
}

fn up(flags: &str) -> Place {
    let place = Place::new();
    place.ok(&format!("up --profile rev-a {flags}"));
    place
}

fn down(place: &Place) {
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn collectives_on_a_ring_are_right_and_take_what_was_predicted() {
    let place = up("--cards 4 --topology ring");
    let cards = json(&place, "cards --json");
    assert_eq!(cards["nature"], "emulated, card time");
    assert_eq!(cards["links"].as_array().map(Vec::len), Some(8));
    for card in cards["cards"].as_array().expect("cards") {
        assert_eq!((&card["state"], &card["kind"]), (&"up".into(), &"twin".into()));
        assert_eq!((&card["profile"], &card["pace"]), (&"rev-a".into(), &"card".into()));
        assert_eq!(card["memory_bytes"], card["memory_free_bytes"]);
    }
    assert!(text(&place, "probe").contains("0 -> 1"));
    let usual = rows(&place, "all-reduce");
    let sizes: Vec<u64> = usual.iter().filter_map(|row| row["bytes_per_card"].as_u64()).collect();
    assert!(sizes.contains(&8192) && sizes.contains(&1_048_576), "{sizes:?}");
    for row in &usual {
        assert_eq!((&row["wrong"], &row["clock"]), (&0.into(), &"card".into()), "{row}");
        assert_eq!((&row["emulated"], &row["fabric"]), (&true.into(), &"cards".into()));
        let error = row["error_percent"].as_f64().expect("a prediction").abs();
        let most = if row["bytes_per_card"] == 1_048_576 { 5.0 } else { 10.0 };
        assert!(error <= most, "{row}");
    }
    for collective in ["reduce-scatter", "all-gather", "broadcast", "reduce", "gather", "scatter"] {
        for row in rows(&place, &format!("{collective} --sizes 12K --root 2 --dtype i32")) {
            assert_eq!((&row["wrong"], &row["collective"]), (&0.into(), &collective.into()));
        }
    }
    for line in ["all-to-all --sizes 12K", "barrier", "all-reduce --sizes 9K --dtype bf16 --op avg"]
    {
        assert_eq!(rows(&place, line)[0]["wrong"], 0, "{line}");
    }
    let table = text(&place, "bench all-reduce --fabric cards --sizes 1M --algorithm two-shot");
    for word in ["emulated, card time", "two-shot", "predicted", "#wrong"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    down(&place);
}

#[test]
fn probe_measures_every_direction_and_cards_shows_it() {
    let place = up("--cards 3 --topology ring");
    assert_eq!(json(&place, "cards --json")["links"][0]["source"], "profile");
    let report = json(&place, "probe --sizes 64,4K,1M --json");
    let links = report["links"].as_array().expect("links");
    assert_eq!(links.len(), 6);
    for link in links {
        let rate = link["bandwidth_bytes_per_second"].as_f64().expect("a rate");
        let said = link["profile_bandwidth_bytes_per_second"].as_f64().expect("a rate");
        assert!((rate / said - 1.0).abs() < 0.02, "{link}");
        let latency = link["latency_ns"].as_f64().expect("a time");
        assert!((1_900.0..2_300.0).contains(&latency), "{link}");
        assert!(link["worst_residual"].as_f64().expect("a share") < 0.02, "{link}");
        assert_eq!(link["samples"].as_array().map(Vec::len), Some(3));
    }
    let cards = json(&place, "cards --json");
    let links = cards["links"].as_array().expect("links");
    assert!(links.iter().all(|link| link["source"] == "probe"), "{cards}");
    place.ok("cut 0-1");
    let cut = text(&place, "probe --sizes 64,1M");
    assert!(cut.contains("0 -> 2"), "{cut}");
    assert!(!cut.lines().any(|line| line.starts_with("0 -> 1  ") && line.contains("B/s")), "{cut}");
    down(&place);
}

#[test]
fn card_that_is_killed_during_a_bench_ends_it_within_a_second_and_the_rest_goes_on() {
    let place = up("--cards 4 --topology ring");
    let sizes = ["4M"; 4000].join(",");
    let line = format!("bench all-reduce --fabric cards --json --sizes {sizes}");
    let mut bench = place.spanker(&line).spawn().expect("it starts");
    let mut out = BufReader::new(bench.stdout.take().expect("a pipe"));
    let mut first = String::new();
    out.read_line(&mut first).expect("a row");
    let card = pid(&place.status()["cards"][2]["pid"]);
    let killed = Instant::now();
    signal(card, Signal::KILL);
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("text");
    let output = bench.wait_with_output().expect("it ends");
    let took = killed.elapsed();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(errors.starts_with("error: card 2 is gone"), "{errors}");
    assert!(errors.contains("\nhint: go on without it: --cards 0,1,3\n"), "{errors}");
    // Nothing of the bench is left on the cards.
    within(SOON, || {
        let cards = json(&place, "cards --json");
        let left = |card: &Value| card["memory_bytes"] == card["memory_free_bytes"];
        cards["cards"].as_array().expect("cards").iter().all(left).then_some(())
    });
    let cards = json(&place, "cards --json");
    assert_eq!(cards["cards"][2]["state"], "down");
    assert!(cards["cards"][2]["reason"].as_str().expect("a reason").contains("gone"), "{cards}");
    let loose = cards["links"].as_array().expect("links").iter().filter(|l| l["to"].is_null());
    assert!(loose.count() == 2, "{cards}");
    let again = error(&place, 1, "bench all-reduce --fabric cards --sizes 8K");
    assert!(again.contains("card 2") && again.contains("--cards 0,1,3"), "{again}");
    for row in rows(&place, "all-reduce --sizes 8K,1M --cards 0,1,3") {
        assert_eq!(row["wrong"], 0, "{row}");
        assert_eq!(row["cards"], serde_json::json!([0, 1, 3]));
        assert!(row["error_percent"].as_f64().expect("a prediction").abs() < 10.0, "{row}");
    }
    let flight = json(&place, "flight --all --json");
    assert_eq!(flight["cards"][2]["state"], "down");
    let kinds: Vec<&str> = flight["records"]
        .as_array()
        .expect("records")
        .iter()
        .filter_map(|record| record["kind"].as_str())
        .collect();
    assert!(kinds.contains(&"submitted") && kinds.contains(&"link"), "{kinds:?}");
    let text = text(&place, "flight");
    assert!(text.contains("   2  down") && text.contains("is complete"), "{text}");
    down(&place);
}

#[test]
fn run_on_cards_of_an_old_version_is_refused_before_weights_are_sent() {
    let place = up("--cards 2 --abi 0.2.0");
    let model = place.outer.path().join("model.gguf");
    let model = model.display();
    text(
        &place,
        &format!(
            "synth llama --hidden 64 --heads 4 --kv-heads 2 --ffn 128 --layers 2 --vocab 300 --out {model}"
        ),
    );
    let errors = error(&place, 1, &format!("run -m {model} -p abc -n 4 --fabric cards"));
    assert!(errors.contains("card 0") && errors.contains("0.2.0"), "{errors}");
    let card = SpankerControl::open_path(place.dir.join("spanker0")).expect("a card");
    let written = card.counters().expect("a card").host_in;
    assert_eq!(written, 0, "{errors}");
    down(&place);
}

#[test]
fn run_opens_every_card_once_and_writes_its_weights_once() {
    let place = up("--cards 3");
    let model = place.outer.path().join("model.gguf");
    let model = model.display();
    text(
        &place,
        &format!(
            "synth llama --hidden 256 --heads 8 --kv-heads 4 --ffn 512 --layers 4 --vocab 512 --out {model}"
        ),
    );
    let weights = std::fs::metadata(model.to_string()).expect("a model").len();
    let command =
        format!("run -m {model} -p abc -n 4 --ignore-eos --temp 0 --ctx-size 64 --fabric cards");
    let mut command = place.spanker(&command);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut running = command.spawn().expect("the command starts");
    let process = running.id();
    assert!(running.wait().expect("it ends").success());
    let flight = json(&place, "flight --all --json");
    let came = format!("process {process} came");
    let mut written = 0;
    for card in 0..3 {
        let records = flight["records"].as_array().expect("records").iter();
        let of_card = records.filter(|record| record["card"] == card && record["text"] == came[..]);
        assert_eq!(of_card.count(), 1, "card {card} was opened once");
        let control = SpankerControl::open_path(place.dir.join(format!("spanker{card}")));
        written += control.and_then(|card| card.counters()).expect("a card").host_in;
    }
    // Norms and rotary angles are on every card; everything else is on one.
    let once = weights / 2..weights * 5 / 4;
    assert!(once.contains(&written), "{written} bytes were written, the model has {weights}");
    down(&place);
}

#[test]
fn bench_that_is_interrupted_leaves_nothing_on_the_cards() {
    let place = up("--cards 2");
    let sizes = ["4M"; 4000].join(",");
    let line = format!("bench all-reduce --fabric cards --json --sizes {sizes}");
    let mut bench = place.spanker(&line).spawn().expect("it starts");
    let mut out = BufReader::new(bench.stdout.take().expect("a pipe"));
    out.read_line(&mut String::new()).expect("a row");
    // Whoever runs the tests in the background may have interrupts ignored; this ends a program as they do.
    signal(bench.id() as i32, Signal::TERM);
    bench.wait().expect("it ends");
    within(SOON, || {
        let cards = json(&place, "cards --json");
        let free = |card: &Value| {
            card["memory_bytes"] == card["memory_free_bytes"] && card["owner"].is_null()
        };
        cards["cards"].as_array().expect("cards").iter().all(free).then_some(())
    });
    assert_eq!(rows(&place, "all-reduce --sizes 8K")[0]["wrong"], 0);
    down(&place);
}

#[test]
fn faults_of_every_kind_name_the_culprit_and_how_to_go_on() {
    let place = up("--cards 4 --topology ring");
    place.ok("stick 1");
    let line = "bench all-reduce --fabric cards --sizes 8K --deadline 200ms";
    let stuck = error(&place, 1, line);
    assert!(stuck.contains("error: card 1 is stuck: no progress for 200 ms"), "{stuck}");
    assert!(stuck.contains("card 2: receiving from card 1"), "{stuck}");
    assert!(stuck.contains("hint: go on without it: --cards 0,2,3"), "{stuck}");
    place.ok("restore");
    place.ok("garble 3");
    let wrong = error(&place, 1, "bench all-reduce --fabric cards --sizes 8K");
    assert!(wrong.contains("card 3 gives wrong answers") && wrong.contains("0,1,2"), "{wrong}");
    place.ok("restore");
    place.ok("cut 0-1");
    assert_eq!(rows(&place, "all-reduce --sizes 8K")[0]["wrong"], 0);
    place.ok("cut 2-3");
    let apart = error(&place, 1, "bench all-reduce --fabric cards --sizes 8K");
    assert!(apart.contains("cannot reach") && apart.contains("hint: "), "{apart}");
    down(&place);
}

#[test]
fn cards_of_other_paces_are_measured_by_the_wall_clock_and_say_so() {
    let place = up("--cards 2 --unshaped");
    let row = &rows(&place, "all-reduce --sizes 64K --budget 20")[0];
    assert_eq!((&row["clock"], &row["pace"]), (&"wall".into(), &"unshaped".into()));
    assert_eq!((&row["predicted_us"], &row["algorithm"]), (&Value::Null, &"ring".into()));
    assert_eq!(row["wrong"], 0);
    assert!(row["repeats"].as_u64().is_some_and(|repeats| repeats >= 7), "{row}");
    let report = json(&place, "probe --sizes 64,64K,1M --json");
    assert_eq!(report["links"].as_array().map(Vec::len), Some(2));
    place.ok("up --replace --cards 2 --pace wall");
    let row = &rows(&place, "all-reduce --sizes 1M --budget 20")[0];
    assert_eq!((&row["clock"], &row["pace"]), (&"wall".into(), &"wall".into()));
    let (took, said) = (row["time_us"].as_f64().unwrap(), row["predicted_us"].as_f64().unwrap());
    assert!(took > said * 0.99, "{row}");
    down(&place);
}

#[test]
fn hubs_and_cards_that_differ_are_predicted_as_what_they_are() {
    let place = Place::new();
    for flags in [
        "--cards 4 --profile rev-a --topology switch",
        "--cards 4 --profile h200-nvlink",
        "--cards 3 --profile rev-a --topology mesh",
        "--profile rev-a*2,rev-a@2GB/s --topology ring",
    ] {
        place.ok(&format!("up --replace {flags}"));
        let row = &rows(&place, "all-reduce --sizes 1M")[0];
        assert_eq!(row["wrong"], 0, "{flags}: {row}");
        assert!(row["error_percent"].as_f64().expect("a prediction").abs() < 5.0, "{flags}: {row}");
    }
    down(&place);
}

#[test]
fn twin_in_its_usual_place_is_found_without_the_variable() {
    if std::path::Path::new("/dev/spanker0").exists() {
        eprintln!("skipped: this machine has cards");
        return;
    }
    let mut place = Place::new();
    place.dir = place.outer.path().join("spanker");
    let command = |line: &str| {
        let mut command = place.spanker(line);
        command.env_remove("SPANKER_DEV_DIR").env("XDG_RUNTIME_DIR", place.outer.path());
        run(command)
    };
    assert!(command("twin up --cards 2").status.success());
    let cards = String::from_utf8(command("cards").stdout).expect("text");
    assert!(cards.contains(place.dir.to_str().expect("text")), "{cards}");
    assert!(cards.contains("emulated, card time"), "{cards}");
    assert!(command("twin down").status.success());
    place.assert_nothing_is_left();
}

#[test]
fn mistakes_are_named_and_end_with_2() {
    let place = up("--cards 2");
    for (line, named) in [
        ("bench all-reduce --fabric cards --cards 0", "--cards 0"),
        ("bench all-reduce --fabric cards --cards 3", "--cards 3"),
        ("bench all-reduce --fabric cards --cards 0,2", "no card 2"),
        ("bench all-reduce --fabric cards --cards 0,0", "'0,0'"),
        ("bench all-reduce --fabric cards --cards x", "'x'"),
        ("bench all-reduce --fabric cards --algorithm fused", "--fabric host"),
        ("bench all-reduce --fabric cards --algorithm rign", "rign"),
        ("bench all-reduce --fabric cards --threads 2", "--fabric host"),
        ("bench all-reduce --fabric cards --sizes 3", "--sizes 3"),
        ("bench all-reduce --fabric cards --op xor", "--op xor"),
        ("bench all-reduce --fabric cards --deadline soon", "soon"),
        ("bench all-reduce --fabric cards --deadline 1us", "1us"),
        ("bench broadcast --fabric cards --root 5", "--root 5"),
        ("bench all-redcue --fabric cards", "all-redcue"),
        ("probe --cards 7", "--cards 7"),
        ("probe --cards 0,9", "no card 9"),
        ("probe --sizes 0", "size '0' is zero"),
        ("flight --some", "--some"),
    ] {
        let error = error(&place, 2, line);
        assert!(error.contains(named), "{line}: {error}");
    }
    // Nobody's memory is large enough for this.
    let refused = error(&place, 1, "bench all-reduce --fabric cards --sizes 900G");
    assert!(refused.contains("card 0"), "{refused}");
    down(&place);
    for line in ["bench all-reduce --fabric cards", "probe", "flight"] {
        let none = error(&place, 1, line);
        assert!(none.contains("no cards") && none.contains("\nhint: "), "{line}: {none}");
    }
}

/// A socket on which a card answers the question for its version, and every other with this status.
fn refusing(place: &Place, minor: u16, status: i32) {
    std::fs::create_dir_all(&place.dir).expect("a directory");
    let listener = UnixListener::bind(place.dir.join("spanker0")).expect("a socket");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut bytes = Vec::new();
            while let Some(message) = next_request(&mut stream, &mut bytes) {
                let answer = match abi::request(message.0) {
                    Some(("GET_VERSION", size, _)) => {
                        let head = head(message.0, 0, message.1, size, 0);
                        let mut version = vec![0; size];
                        version[2..4].copy_from_slice(&minor.to_le_bytes());
                        [&head[..], &version].concat()
                    }
                    _ => head(message.0, status, message.1, 0, 0).to_vec(),
                };
                if stream.write_all(&answer).is_err() {
                    break;
                }
            }
        }
    });
}

/// The number and the sequence of the next request of a program.
fn next_request(stream: &mut UnixStream, bytes: &mut Vec<u8>) -> Option<(u32, u64)> {
    loop {
        match parse(bytes) {
            Parsed::Request(message) => {
                let (found, used) = ((message.number, message.sequence), message.used);
                bytes.drain(..used);
                return Some(found);
            }
            Parsed::Incomplete(needed) => {
                let known = bytes.len();
                bytes.resize(needed, 0);
                stream.read_exact(&mut bytes[known..]).ok()?;
            }
            Parsed::Refused { .. } => return None,
        }
    }
}

#[test]
fn card_that_does_not_know_discovery_is_up_and_one_that_fails_it_is_down_with_the_reason() {
    let unknown = Place::new();
    refusing(&unknown, 2, 25); // ENOTTY
    let card = &json(&unknown, "cards --json")["cards"][0];
    assert_eq!((&card["state"], &card["abi"]), (&"up".into(), &"0.2.0".into()), "{card}");

    let failing = Place::new();
    refusing(&failing, 2, 5); // EIO
    let card = &json(&failing, "cards --json")["cards"][0];
    let reason = card["reason"].as_str().unwrap_or_default();
    assert_eq!(card["state"], "down", "{card}");
    assert!(reason.starts_with("CARD_INFO refused (EIO"), "{card}");
}

/// A ring of three cards of a version of the ABI.
fn of_version(version: &str) -> Place {
    up(&format!("--cards 3 --topology ring --abi {version}"))
}

#[test]
fn cards_without_link_discovery_are_up_without_links_and_run_no_collective() {
    for version in ["0.0.0", "0.1.0"] {
        let place = of_version(version);
        let report = json(&place, "cards --json");
        for card in report["cards"].as_array().expect("cards") {
            assert_eq!((&card["state"], &card["abi"]), (&"up".into(), &version.into()), "{card}");
            assert_eq!(card.get("serial"), None, "{card}");
        }
        assert_eq!(report["links"].as_array().map(Vec::len), Some(0), "{report}");
        let refused = error(&place, 1, "bench all-reduce --fabric cards");
        let named = format!("request CARD_INFO needs ABI 0.2.0, the card speaks {version}");
        assert!(refused.contains("card 0") && refused.contains(&named), "{refused}");
        down(&place);
    }
}

#[test]
fn cards_of_older_and_newer_minor_versions_with_links_run_collectives() {
    for version in ["0.2.0", "0.5.0"] {
        let place = of_version(version);
        let report = json(&place, "cards --json");
        assert_eq!(report["cards"][2]["abi"], version, "{report}");
        assert_eq!(report["links"].as_array().map(Vec::len), Some(6), "{report}");
        let rows = rows(&place, "all-reduce --sizes 1K");
        assert_eq!(rows[0]["wrong"], 0, "{rows:?}");
        down(&place);
    }
}

#[test]
fn cards_of_another_major_version_are_refused_by_name() {
    let place = of_version("1.0");
    let report = json(&place, "cards --json");
    let card = &report["cards"][1];
    assert_eq!((&card["state"], &card["abi"]), (&"down".into(), &"1.0.0".into()), "{card}");
    let refused = error(&place, 1, "bench all-reduce --fabric cards");
    let named = "the card speaks ABI 1.0.0, this program 0.5.0";
    assert!(refused.contains("card 0") && refused.contains(named), "{refused}");
    down(&place);
}

#[test]
fn product_on_a_card_that_is_a_process_has_the_hosts_bits_and_a_dead_one_leaves_the_output() {
    let place = up("--cards 2 --topology ring");
    let card = SpankerControl::open_path(place.dir.join("spanker1")).expect("a card");
    let patient = Deadline { detect: SOON, ..Deadline::USUAL };
    let on_card = CardMatmul::new(card, patient).expect("a card");
    let (a, b) = (vec![0x31; 3 * 2 * 144], vec![0x24; 7 * 2 * 144]);
    let (mut out, mut expected) = (vec![0; 84], vec![0; 84]);
    HostMatmul.matmul_q4_k(&a, &b, &mut expected, 3, 512, 7).expect("dimensions");
    on_card.matmul_q4_k(&a, &b, &mut out, 3, 512, 7).expect("a product");
    assert_eq!(out, expected);
    place.ok("kill 1");
    out.fill(0xA5);
    let error = on_card.matmul_q4_k(&a, &b, &mut out, 3, 512, 7).expect_err("no card");
    assert_eq!(error.to_string(), "card 1: allocate: the card is gone (ALLOCATE)");
    assert_eq!(out, [0xA5; 84]);
    down(&place);
}
