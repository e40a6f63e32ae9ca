// SPDX-License-Identifier: Apache-2.0
//! The Python helper computes what the Rust formulas compute, at every point of its grid.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use spanker_collective::Algorithm;
use spanker_plan::formula::{
    Decode, Link, all_reduce, break_even_alpha, framed_bytes, framed_ring_all_reduce,
    layer_split_stage, layer_split_streams, layer_split_token, pipeline_bubble, pipeline_prefill,
    ring_all_gather, star_all_reduce, tensor_parallel_token,
};
use spanker_topology::{BytesPerSecond, Framing, Saturation, Seconds};

/// The formulas of the crate spanker-topology, under their Python names.
const OF_THE_LINK: [&str; 6] =
    ["efficiency", "frame_error_rate", "go_back_n", "goodput", "round_trip", "saturation"];

const FEWEST_POINTS: usize = 1000;
const RELATIVE: f64 = 1e-9;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs the helper; gives its exit code, standard output and standard error.
fn helper(arguments: &[&str]) -> (Option<i32>, String, String) {
    let script = root().join("python/spanker_link.py");
    let run = Command::new("python3").arg(&script).args(arguments).output();
    let run = run.unwrap_or_else(|error| {
        panic!("python3 does not run ({error}): scripts/setup installs it")
    });
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the helper prints text");
    (run.status.code(), text(run.stdout), text(run.stderr))
}

fn grid() -> Vec<Value> {
    let (code, out, err) = helper(&["grid"]);
    assert_eq!(code, Some(0), "{err}");
    out.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

/// The arguments of one point.
struct Given<'a>(&'a Value);

impl Given<'_> {
    fn number(&self, name: &str) -> f64 {
        self.0[name].as_f64().unwrap_or_else(|| panic!("{name} is no number in {}", self.0))
    }

    fn whole(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("{name} is no whole number in {}", self.0))
    }

    fn ranks(&self, name: &str) -> usize {
        self.whole(name) as usize
    }

    fn seconds(&self, name: &str) -> Seconds {
        Seconds(self.number(name))
    }

    fn raw(&self) -> BytesPerSecond {
        BytesPerSecond(self.whole("raw"))
    }

    fn framing(&self) -> Framing {
        serde_json::from_value(self.0["framing"].clone()).expect("a framing")
    }

    fn link(&self) -> Link {
        let link = Given(&self.0["link"]);
        Link { base: link.seconds("base"), alpha: link.seconds("alpha"), rate: link.number("rate") }
    }

    fn decode(&self) -> Decode {
        let decode = Given(&self.0["decode"]);
        Decode {
            read: decode.number("read"),
            layers: decode.whole("layers"),
            hidden: decode.whole("hidden"),
            memory_rate: decode.number("memory_rate"),
        }
    }

    fn stages(&self) -> Vec<Seconds> {
        serde_json::from_value(self.0["stages"].clone()).expect("stages")
    }

    fn algorithm(&self) -> Algorithm {
        self.0["algorithm"].as_str().expect("an algorithm").parse().expect("a known algorithm")
    }
}

fn saturation_name(given: &Given<'_>) -> &'static str {
    let (failed, lanes) = (given.whole("failed_trainings"), given.whole("lanes"));
    match Saturation::decide(given.number("error_rate"), failed as u32, lanes as u32) {
        Saturation::Keep => "keep",
        Saturation::ShrinkFrames => "shrink-frames",
        Saturation::Retrain => "retrain",
        Saturation::HalveLanes => "halve-lanes",
        Saturation::Fault => "fault",
        other => panic!("{other:?} has no name in Python"),
    }
}

/// What Rust computes at a point, as Python writes it.
fn recompute(function: &str, given: &Given<'_>) -> Value {
    let value = match function {
        "saturation" => return Value::from(saturation_name(given)),
        "break_even_alpha" => {
            let alpha = break_even_alpha(given.decode(), given.ranks("cards"), given.link());
            return Value::from(alpha.map(|alpha| alpha.0));
        }
        "efficiency" => given.framing().efficiency(),
        "frame_error_rate" => given.framing().frame_error_rate(given.number("ber")),
        "go_back_n" => {
            let (ber, round_trip) = (given.number("ber"), given.seconds("round_trip"));
            given.framing().go_back_n(given.raw(), ber, round_trip)
        }
        "goodput" => {
            let (ber, round_trip) = (given.number("ber"), given.seconds("round_trip"));
            given.framing().goodput(given.raw(), ber, round_trip)
        }
        "round_trip" => {
            let (payload, pipeline) = (given.whole("payload"), given.seconds("pipeline"));
            given.framing().round_trip(given.raw(), payload, pipeline).0
        }
        "framed_bytes" => framed_bytes(given.framing(), given.raw(), given.number("size")).0,
        "framed_ring_all_reduce" => {
            let (ranks, size) = (given.ranks("ranks"), given.number("size"));
            let alpha = given.seconds("alpha");
            framed_ring_all_reduce(ranks, size, given.framing(), given.raw(), alpha).0
        }
        "pipeline_prefill" => pipeline_prefill(&given.stages(), given.whole("pieces")).0,
        "pipeline_bubble" => pipeline_bubble(given.ranks("stages"), given.whole("pieces")),
        other => over_links(other, given),
    };
    Value::from(value)
}

/// The formulas over a [`Link`].
fn over_links(function: &str, given: &Given<'_>) -> f64 {
    let link = given.link();
    let collective = || (given.ranks("ranks"), given.number("size"));
    let token = || (given.decode(), given.ranks("cards"));
    match function {
        "all_reduce" => {
            let (ranks, size) = collective();
            all_reduce(given.algorithm(), ranks, size, link).0
        }
        "star_all_reduce" => {
            let (ranks, size) = collective();
            star_all_reduce(ranks, size, link).0
        }
        "ring_all_gather" => {
            let (ranks, size) = collective();
            ring_all_gather(ranks, size, link).0
        }
        "tensor_parallel_token" => {
            let (decode, cards) = token();
            tensor_parallel_token(decode, cards, link).0
        }
        "layer_split_token" => {
            let (decode, cards) = token();
            layer_split_token(decode, cards, link).0
        }
        "layer_split_stage" => {
            let (decode, cards) = token();
            layer_split_stage(decode, cards, link).0
        }
        "layer_split_streams" => {
            let (decode, cards) = token();
            layer_split_streams(decode, cards, link, given.ranks("streams"))
        }
        other => panic!("the grid has {other}, which Rust does not"),
    }
}

fn agree(python: &Value, rust: &Value) -> bool {
    match (python.as_f64(), rust.as_f64()) {
        (Some(a), Some(b)) => (a - b).abs() <= RELATIVE * a.abs().max(b.abs()),
        _ => python == rust,
    }
}

#[test]
fn python_agrees_with_rust_at_every_point_of_its_grid() {
    let points = grid();
    assert!(points.len() >= FEWEST_POINTS, "only {} points", points.len());
    for point in &points {
        let function = point["function"].as_str().expect("a name");
        let rust = recompute(function, &Given(&point["in"]));
        assert!(agree(&point["out"], &rust), "{point}: Rust computes {rust}");
    }
}

/// Names after `word` at the beginning of a line.
fn names_after(word: &str, text: &str) -> BTreeSet<String> {
    let name = |rest: &str| rest.split('(').next().unwrap_or(rest).to_owned();
    text.lines().filter_map(|line| line.strip_prefix(word)).map(name).collect()
}

#[test]
fn grid_has_every_formula_of_both_languages() {
    let points = grid();
    let name = |point: &Value| point["function"].as_str().expect("a name").to_owned();
    let in_grid: BTreeSet<String> = points.iter().map(name).collect();

    let rust = include_str!("../../src/formula.rs");
    let of_the_link = OF_THE_LINK.map(str::to_owned);
    let in_rust: BTreeSet<String> =
        names_after("pub fn ", rust).into_iter().chain(of_the_link).collect();
    assert_eq!(in_grid, in_rust);

    let python = fs::read_to_string(root().join("python/spanker_link.py")).expect("the helper");
    let (formulas, _) = python.split_once("# Points to compare with").expect("the formulas' end");
    assert_eq!(in_grid, names_after("def ", formulas));

    for algorithm in Algorithm::ALL {
        let used = |point: &&Value| point["in"]["algorithm"] == algorithm.name();
        assert!(points.iter().find(used).is_some(), "{algorithm} is not in the grid");
    }
}

#[test]
fn commands_print_a_figure_and_wrong_arguments_exit_with_2() {
    let prints = |arguments: &[&str], expected: &str| {
        let (code, out, err) = helper(arguments);
        assert_eq!((code, out.trim()), (Some(0), expected), "{arguments:?}: {err}");
    };
    prints(&["all-reduce", "--ranks", "4", "--bytes", "4096"], "24.471 us");
    prints(&["goodput", "--payload", "2048", "--ber", "1e-6"], "472864424 B/s");
    for (wrong, named) in [
        (&["goodput", "--ber", "1"][..], "'1'"),
        (&["goodput", "--payload", "0"], "'0'"),
        (&["all-reduce", "--ranks", "four", "--bytes", "1"], "'four'"),
        (&["all-reduce", "--ranks", "4", "--bytes", "1", "--rate", "0"], "above zero"),
        (&["all-reduce", "--ranks", "4", "--bytes", "1", "--alpha", "nan"], "'nan'"),
        (&["all-reduce", "--ranks", "4"], "--bytes"),
        (&["tables"], "'tables'"),
        (&[], "COMMAND"),
    ] {
        let (code, out, err) = helper(wrong);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{wrong:?}: {err}");
        assert!(err.contains(named), "{wrong:?}: {err}");
    }
}
