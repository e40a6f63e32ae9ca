// SPDX-License-Identifier: Apache-2.0
//! The command as a user runs it: output, JSON, exit codes.

use std::process::{Command, Output};

use serde_json::Value;

fn spanker(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spanker"));
    // A twin that somebody has up on this machine is not looked at.
    command.env_remove("SPANKER_DEV_DIR").env("XDG_RUNTIME_DIR", "/nowhere");
    command.args(args).output().expect("the command starts")
}

fn stdout(args: &[&str]) -> String {
    let output = spanker(args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    String::from_utf8(output.stdout).expect("text")
}

/// The rows of a bench, whose flags have no spaces in them.
fn rows(line: &str) -> Vec<Value> {
    let line = format!("bench {line} --json --budget 1");
    stdout(&line.split(' ').collect::<Vec<_>>())
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON object"))
        .collect()
}

/// What a refused command says. A usage error exits with 2.
fn usage_error(args: &[&str]) -> String {
    refused(args, 2)
}

/// What a command says that prints nothing and exits with `code`.
fn refused(args: &[&str], code: i32) -> String {
    let output = spanker(args);
    assert_eq!(output.status.code(), Some(code), "{args:?}");
    assert!(output.stdout.is_empty(), "{args:?} printed before it failed");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn one_of_the_ranks_says_what_is_wrong_with_the_flags() {
    for (arguments, said) in [
        (&["bench", "--nonsense"][..], "--nonsense"),
        (&["plan", "tinyllama-1.1b"], "one process's work"),
    ] {
        for rank in ["0", "1"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_spanker"));
            command.env("OMPI_COMM_WORLD_SIZE", "2").env("OMPI_COMM_WORLD_RANK", rank);
            let output = command.args(arguments).output().expect("the command starts");
            assert_eq!(output.status.code(), Some(2), "{arguments:?} of rank {rank}");
            let told = String::from_utf8_lossy(&output.stderr);
            assert_eq!(told.contains(said), rank == "0", "{told}");
            assert!(rank == "0" || told.is_empty(), "{told}");
        }
    }
}

#[test]
fn every_collective_is_right_by_every_way_of_running_it() {
    let collectives =
        "all-reduce reduce-scatter all-gather broadcast reduce gather scatter all-to-all barrier";
    let ways =
        "auto fused messages ring recursive-doubling halving-doubling tree one-shot two-shot";
    for collective in collectives.split(' ') {
        for way in ways.split(' ') {
            let line = format!("{collective} --cards 3 --sizes 1000 --algorithm {way}");
            let rows = rows(&line);
            assert_eq!(rows.len(), 1, "{line}");
            assert_eq!(rows[0]["wrong"], 0, "{line}: {}", rows[0]);
            assert_eq!(rows[0]["collective"], collective);
        }
    }
}

#[test]
fn every_legal_pair_of_type_and_operation_is_right() {
    for dtype in ["f32", "f64", "f16", "bf16", "i32", "i64", "u8", "u32"] {
        let float = dtype.contains('f');
        let own: &[&str] = if float { &["logsumexp"] } else { &["or", "and", "xor"] };
        for op in ["sum", "product", "max", "min", "avg"].iter().chain(own) {
            for way in ["fused", "ring"] {
                let of = format!("--dtype {dtype} --op {op} --algorithm {way}");
                let row = &rows(&format!("all-reduce --cards 5 --sizes 1000 {of}"))[0];
                assert_eq!(row["wrong"], 0, "{of}: {row}");
                assert_eq!((&row["dtype"], &row["op"]), (&dtype.into(), &(*op).into()));
            }
        }
    }
}

#[test]
fn large_groups_with_narrow_types_are_right() {
    for (dtype, op) in [("f16", "product"), ("bf16", "sum"), ("u8", "avg"), ("f16", "avg")] {
        for way in ["fused", "ring", "tree", "recursive-doubling", "one-shot"] {
            let of = format!("--dtype {dtype} --op {op} --algorithm {way}");
            let row = &rows(&format!("all-reduce --cards 64 --sizes 2K {of}"))[0];
            assert_eq!(row["wrong"], 0, "{of}: {row}");
        }
    }
}

#[test]
fn a_barrier_has_one_row_whatever_the_sizes() {
    let rows = rows("barrier --cards 4 --sizes 3,900G");
    assert_eq!((rows.len(), &rows[0]["bytes_per_card"]), (1, &Value::from(0)));
}

#[test]
fn json_rows_have_every_documented_field() {
    let row = &rows("all-reduce --cards 4 --sizes 4K --threads 2")[0];
    for (field, value) in [
        ("collective", Value::from("all-reduce")),
        ("cards", 4.into()),
        ("dtype", "f32".into()),
        ("op", "sum".into()),
        ("algorithm", "fused".into()),
        ("bytes_per_card", 4096.into()),
        ("wrong", 0.into()),
    ] {
        assert_eq!(row[field], value, "{field}");
    }
    for field in ["time_us", "algbw_gbps", "busbw_gbps", "limit_fraction", "origin_speedup"] {
        assert!(row[field].as_f64().is_some_and(|number| number > 0.0), "{field}: {row}");
    }
    assert!(row["threads"].as_u64().is_some_and(|threads| threads >= 1));
}

#[test]
fn a_table_has_a_line_for_each_size_under_the_known_columns() {
    let args = ["bench", "all-reduce", "--cards", "2", "--sizes", "1K..4K", "--budget", "1"];
    let text = stdout(&args);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3 + 3, "{text}");
    for column in ["size", "count", "type", "op", "time", "algbw", "busbw", "#wrong"] {
        assert!(lines[1].contains(column), "{column} is not in {}", lines[1]);
    }
    assert!(lines[5].trim_start().starts_with("4K"), "{text}");
}

#[test]
fn uneven_sizes_and_odd_groups_are_right() {
    for cards in ["1", "2", "5", "17"] {
        for way in ["fused", "messages", "ring", "halving-doubling"] {
            let line = format!("all-reduce --cards {cards} --sizes 4,12,1001 --algorithm {way}");
            for row in rows(&line) {
                assert_eq!(row["wrong"], 0, "{line}: {row}");
            }
        }
    }
}

#[test]
fn cards_without_hardware_says_how_to_go_on() {
    if std::path::Path::new("/dev/spanker0").exists() {
        eprintln!("skipped: this machine has cards");
        return;
    }
    let text = stdout(&["cards"]);
    assert!(text.contains("no cards at /dev/spanker0") && text.contains("--mock"), "{text}");
    let report: Value = serde_json::from_str(&stdout(&["cards", "--json"])).expect("JSON");
    assert_eq!(report["cards"].as_array().map(Vec::len), Some(0));
}

#[test]
fn mock_cards_are_shown_with_their_links_and_named_as_mock() {
    let text = stdout(&["cards", "--mock", "3"]);
    assert!(text.contains("mock") && text.matches("up").count() == 6, "{text}");
    let report: Value = serde_json::from_str(&stdout(&["cards", "--mock", "3", "--json"])).unwrap();
    assert_eq!(report["mock"], true);
    assert_eq!(report["links"].as_array().map(Vec::len), Some(6));
}

#[test]
fn bad_requests_exit_with_2_and_name_the_value() {
    for (args, named) in [
        (&["bench", "all-reduce", "--cards", "0"][..], "--cards 0"),
        (&["bench", "all-reduce", "--cards", "2000"], "--cards 2000"),
        (&["bench", "all-reduce", "--cards", "-1"], "-1"),
        (&["bench", "all-reduce", "--cards", "many"], "many"),
        (&["bench", "all-redcue"], "all-redcue"),
        (&["bench", "all-reduce", "--algorithm", "rign"], "rign"),
        (&["bench", "all-reduce", "--op", "mean"], "mean"),
        (&["bench", "all-reduce", "--dtype", "f8"], "f8"),
        (&["bench", "all-reduce", "--op", "xor"], "--op xor is not defined for --dtype f32"),
        (&["bench", "all-reduce", "--op", "logsumexp", "--dtype", "i32"], "logsumexp"),
        (&["bench", "all-reduce", "--threads", "0"], "'0' threads"),
        (&["bench", "all-reduce", "--threads", "9999"], "'9999' threads"),
        (&["bench", "all-reduce", "--sizes", "0"], "size '0' is zero"),
        (&["bench", "all-reduce", "--sizes", ""], "size ''"),
        (&["bench", "all-reduce", "--sizes", "4Q"], "size '4Q'"),
        (&["bench", "all-reduce", "--sizes", "1M..4K"], "runs backwards"),
        (&["bench", "all-reduce", "--sizes", "3"], "--sizes 3"),
        (&["bench", "all-reduce", "--sizes", "99999999999G"], "99999999999G"),
        (&["bench", "broadcast", "--root", "4"], "--root 4"),
        (&["bench", "all-reduce", "--budget", "0"], "0"),
        (&["bench", "all-reduce", "--cards", "0,1"], "--fabric cards"),
        (&["bench", "all-reduce", "--deadline", "1s"], "--fabric cards"),
        (&["bench", "all-reduce", "--fabric", "ether"], "ether"),
        (&["cards", "--mock", "0"], "--mock 0"),
        (&["cards", "--mock", "99999"], "--mock 99999"),
        (&["frobnicate"], "frobnicate"),
        (&[], "Usage"),
    ] {
        let text = usage_error(args);
        assert!(text.contains(named), "{args:?}: {text}");
    }
}

#[test]
fn buffers_that_do_not_fit_the_memory_exit_with_3() {
    let text = refused(&["bench", "all-reduce", "--sizes", "900G", "--cards", "64"], 3);
    assert!(text.contains("900G") && text.contains("are available"), "{text}");
    assert!(stdout(&["--help"]).contains("3 a model or buffers that do not fit"));
}

#[test]
fn help_teaches_each_command() {
    assert!(stdout(&["--help"]).contains("spanker bench all-reduce --cards 4"));
    let text = stdout(&["bench", "--help"]);
    for word in ["--sizes", "--dtype", "--op", "--threads", "--algorithm", "--json", "Examples"] {
        assert!(text.contains(word), "{word} is not in the help");
    }
    assert!(stdout(&["cards", "--help"]).contains("--mock"));
    assert!(stdout(&["probe", "--help"]).contains("latency plus bytes over bandwidth"));
    assert!(stdout(&["flight", "--help"]).contains("--all"));
    assert!(stdout(&["--version"]).starts_with("spanker "));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    use std::process::Stdio;
    let mut child = Command::new(env!("CARGO_BIN_EXE_spanker"))
        .args(["cards", "--mock", "16"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && errors.is_empty(), "{errors}");
}
