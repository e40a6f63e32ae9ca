// SPDX-License-Identifier: Apache-2.0
//! The tables of `docs/link-model.md` are what the formulas give for the built-in profiles.

use std::fmt::Display;

use spanker_collective::{Algorithm, Collective};
use spanker_plan::formula::{Link, all_reduce, framed_ring_all_reduce};
use spanker_plan::{cheapest, prices};
use spanker_test_support::tables::{self, table};
use spanker_topology::{
    BytesPerSecond, Cluster, Framing, LinkProfile, Profile, Saturation, Seconds, Shape, Value,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The bit error rates of the tables.
const ERRORS: [f64; 5] = [0.0, 1e-7, 5e-7, 1e-6, 1e-5];

/// The profiles that answer contradictions between the hardware documents.
const SWITCHES: [&str; 5] =
    ["rev-a", "rev-a-x16", "rev-a-3lane", "rev-a-gbe-only", "what-if-3g125"];

/// The reference card's link.
fn rev_a() -> LinkProfile {
    Profile::builtin("rev-a").unwrap().link.unwrap()
}

fn framing() -> Framing {
    rev_a().framing.unwrap()
}

fn size(bytes: u64) -> String {
    match bytes {
        b if b >= MIB => format!("{} MiB", b / MIB),
        b if b >= KIB => format!("{} KiB", b / KIB),
        b => format!("{b} B"),
    }
}

/// Digits in groups of three, with one decimal below a thousand.
fn grouped(value: f64) -> String {
    if value < 999.95 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn megabytes(rate: f64) -> String {
    format!("{:.1}", rate / 1e6)
}

fn error_rate(ber: f64) -> String {
    if ber == 0.0 { "0".to_owned() } else { format!("{ber:e}") }
}

/// One value of a profile with its range and its source.
fn sourced<T: Display>(what: &str, value: &Value<T>) -> Vec<String> {
    let end = |end: &Option<T>| end.as_ref().map_or("-".to_owned(), T::to_string);
    vec![
        what.to_owned(),
        value.value.to_string(),
        end(&value.low),
        end(&value.high),
        format!("{}, {}", value.provenance, value.confidence),
        value.source.clone(),
    ]
}

fn values() -> String {
    let (link, host) = (rev_a(), Profile::builtin("rev-a").unwrap().host);
    table(
        &["what", "value", "low", "high", "how known, trust", "source"],
        [
            sourced("raw rate, one direction", &link.bandwidth),
            sourced("bit error rate", &link.bit_error_rate),
            sourced("lanes", &link.lanes),
            sourced("connectors", &link.ports),
            sourced("64 B round trip at the MAC", &link.round_trip),
            sourced("latency of a step, alpha", &link.latency),
            sourced("base of a collective", &link.base),
            sourced("training", &link.training),
            sourced("host link, one direction", &host.bandwidth),
            sourced("host link, latency", &host.latency),
        ],
    )
}

fn answers() -> String {
    let link = rev_a();
    let range = |value: &Value<Seconds>| {
        let (low, high) = (value.low.unwrap(), value.high.unwrap());
        format!("{} ({low} to {high})", value.value)
    };
    let payload = link.sustained(link.lanes.value);
    let ring = all_reduce(Algorithm::Ring, 4, MIB as f64, Link::of(&link));
    let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
    let framed = "sustained payload of one direction, after framing, CRC and clock compensation";
    let steps =
        "holds its rate; on errors smaller frames, training, fewer lanes, FAULT (our policy)";
    table(
        &["number", "value", "section"],
        [
            row([framed, &format!("{payload}; plan with 480 MB/s"), "[1](#1-sustained-payload)"]),
            row(["training, each time", &range(&link.training), "[1](#1-sustained-payload)"]),
            row([
                "64 bytes there and back at the link's MAC",
                &range(&link.round_trip),
                "[2](#2-round-trip)",
            ]),
            row(["saturation", steps, "[3](#3-saturation)"]),
            row([
                "all-reduce of 1 MiB over 4 cards, ring",
                &ring.to_string(),
                "[4](#4-all-reduce)",
            ]),
        ],
    )
}

fn goodput() -> String {
    let link = rev_a();
    let rows = [64, 256, 512, 1024, 2048, 4096].map(|payload| {
        let frame = framing().with_payload(payload);
        let rate = |ber| frame.goodput(link.bandwidth.value, ber, link.round_trip.value);
        let mut row = vec![size(payload), format!("{:.1} %", 100.0 * frame.efficiency())];
        row.extend(ERRORS.map(|ber| megabytes(rate(ber))));
        row
    });
    let rates = ERRORS.map(|ber| format!("BER {}", error_rate(ber)));
    let mut header = vec!["payload", "of the raw rate"];
    header.extend(rates.iter().map(String::as_str));
    table(&header, rows)
}

fn lanes() -> String {
    let link = rev_a();
    let row = |lanes: u32| {
        let part = link.bandwidth.value.0 * u64::from(lanes) / u64::from(link.lanes.value);
        let payload = link.sustained(lanes).0 as f64;
        vec![lanes.to_string(), megabytes(part as f64), megabytes(payload)]
    };
    table(&["lanes", "raw MB/s", "payload MB/s"], [4, 3, 2, 1].map(row))
}

fn round_trip() -> String {
    let link = rev_a();
    let value = &link.round_trip;
    let ends = [value.low.unwrap(), value.value, value.high.unwrap()];
    // Of 64 bytes' round trip, what is not bytes on the wire.
    let wire = framing().round_trip(link.bandwidth.value, 64, Seconds::ZERO);
    let pipelines = ends.map(|end| (end - wire) / 2.0);
    let rows = [64, 256, 1024, 2048].map(|payload| {
        let raw = link.bandwidth.value;
        let on_wire = framing().round_trip(raw, payload, Seconds::ZERO);
        let mut row = vec![size(payload), format!("{:.3}", on_wire.micros())];
        row.extend(
            pipelines.map(|p| format!("{:.2}", framing().round_trip(raw, payload, p).micros())),
        );
        row
    });
    table(&["payload", "on the wire, us", "low, us", "nominal, us", "high, us"], rows)
}

fn training() -> String {
    let link = rev_a();
    let value = &link.training;
    let ends = [("low", value.low), ("nominal", Some(value.value)), ("high", value.high)];
    let rows = ends.map(|(name, time)| {
        let time = time.unwrap();
        let unsent = time.0 * link.sustained(link.lanes.value).0 as f64;
        let share = |every: f64| format!("{:.4} %", 100.0 * time.0 / every);
        vec![
            name.to_owned(),
            time.to_string(),
            format!("{:.0} kB", unsent / 1e3),
            share(1.0),
            share(60.0),
        ]
    });
    let header = ["", "training", "payload not sent", "lost, once a second", "lost, once a minute"];
    table(&header, rows)
}

fn policy_name(step: Saturation) -> &'static str {
    match step {
        Saturation::Keep => "keep",
        Saturation::ShrinkFrames => "512 B frames",
        Saturation::Retrain => "retrain",
        Saturation::HalveLanes => "halve the lanes",
        Saturation::Fault => "FAULT",
        other => panic!("{other:?} has no name"),
    }
}

fn policy() -> String {
    let rates = [("up to 1 %", 0.01), ("to 5 %", 0.05), ("to 10 %", 0.10), ("above 10 %", 0.11)];
    let rows = rates.map(|(name, rate)| {
        let step = |failed, lanes| policy_name(Saturation::decide(rate, failed, lanes)).to_owned();
        vec![name.to_owned(), step(0, 4), step(3, 4), step(3, 2), step(0, 1), step(3, 1)]
    });
    table(
        &[
            "frames broken in 10 ms",
            "4 lanes",
            "4 lanes, 3 failed trainings",
            "2 lanes, 3 failed trainings",
            "1 lane",
            "1 lane, 3 failed trainings",
        ],
        rows,
    )
}

/// Payload rate on some of the lanes.
fn rate_on(lanes: u64, payload: u64, ber: f64) -> f64 {
    let link = rev_a();
    let raw = link.bandwidth.value.0 * lanes / u64::from(link.lanes.value);
    let frame = framing().with_payload(payload);
    frame.goodput(BytesPerSecond(raw), ber, link.round_trip.value)
}

fn saturation() -> String {
    let rows = [1e-8, 1e-7, 5e-7, 1e-6, 3e-6, 1e-5, 3e-5].map(|ber| {
        let broken = |payload| framing().with_payload(payload).frame_error_rate(ber);
        let percent = |payload| format!("{:.2} %", 100.0 * broken(payload));
        let step = |payload| policy_name(Saturation::decide(broken(payload), 0, 4)).to_owned();
        vec![
            error_rate(ber),
            percent(2048),
            step(2048),
            percent(512),
            step(512),
            megabytes(rate_on(4, 2048, ber)),
            megabytes(rate_on(4, 512, ber)),
            megabytes(rate_on(2, 512, ber)),
        ]
    });
    table(
        &[
            "BER",
            "broken, 2 KiB",
            "policy",
            "broken, 512 B",
            "policy",
            "MB/s, 2 KiB",
            "MB/s, 512 B",
            "MB/s, 512 B, 2 lanes",
        ],
        rows,
    )
}

const SIZES: [u64; 7] = [4 * KIB, 8 * KIB, 16 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB];

fn all_reduces() -> String {
    let value = rev_a().latency;
    let link = Link::of(&rev_a());
    let rows = SIZES.map(|bytes| {
        let mut row = vec![size(bytes)];
        row.extend([2, 4, 8].map(|ranks| {
            let time = |alpha: Option<Seconds>| {
                let link = link.with_alpha(alpha.unwrap());
                grouped(all_reduce(Algorithm::Ring, ranks, bytes as f64, link).micros())
            };
            let (low, high) = (time(value.low), time(value.high));
            format!("{} ({low} to {high})", time(Some(value.value)))
        }));
        row
    });
    table(&["N", "K = 2", "K = 4", "K = 8"], rows)
}

fn frames() -> String {
    let link = Link::of(&rev_a());
    let raw = rev_a().bandwidth.value;
    let rows = [KIB, 4 * KIB, 8 * KIB, 16 * KIB].map(|bytes| {
        let mut row = vec![size(bytes)];
        row.extend([2, 4, 8].map(|ranks| {
            let line = all_reduce(Algorithm::Ring, ranks, bytes as f64, link);
            let framed = framed_ring_all_reduce(ranks, bytes as f64, framing(), raw, link.alpha);
            let more = 100.0 * (framed.0 / line.0 - 1.0);
            format!("{:.1}, {:.1} (+{more:.1} %)", line.micros(), framed.micros())
        }));
        row
    });
    table(&["N", "K = 2", "K = 4", "K = 8"], rows)
}

fn shapes() -> String {
    let sizes = [4 * KIB, 64 * KIB, MIB, 64 * MIB];
    let wirings = [
        (Shape::PointToPoint, 2),
        (Shape::Ring, 4),
        (Shape::Ring, 8),
        (Shape::Mesh, 4),
        (Shape::Mesh, 8),
        (Shape::Star, 4),
        (Shape::Star, 8),
    ];
    let rows = wirings.map(|(shape, cards)| {
        let mut row = vec![shape.to_string(), cards.to_string()];
        match Cluster::uniform(Profile::builtin("rev-a").unwrap(), cards, shape) {
            Err(_) => row.extend(sizes.map(|_| "cannot be built".to_owned())),
            Ok(cluster) => {
                let group: Vec<usize> = (0..cards).collect();
                let all = prices(&cluster, Collective::AllReduce, &group);
                row.extend(sizes.map(|bytes| {
                    let (algorithm, time) = cheapest(&all, bytes as f64);
                    format!("{}, {algorithm}", grouped(time.micros()))
                }));
            }
        }
        row
    });
    let header = ["wiring", "cards", "4 KiB", "64 KiB", "1 MiB", "64 MiB"];
    table(&header, rows)
}

fn switches() -> String {
    let rows = SWITCHES.map(|name| {
        let card = Profile::builtin(name).unwrap();
        let between = match &card.link {
            Some(link) => {
                let rate = link.sustained(link.lanes.value);
                format!("{} lanes, {}", link.lanes.value, rate)
            }
            None => "none".to_owned(),
        };
        let memory = format!("{}, {}", card.memory.capacity.value, card.memory.bandwidth.value);
        vec![format!("`{name}`"), between, memory, card.topology.to_string(), card.summary]
    });
    table(&["profile", "link, payload", "memory", "wiring", "what it assumes"], rows)
}

#[test]
fn tables_of_the_link_model_are_what_the_formulas_give() {
    tables::check(
        "link-model.md",
        &[
            ("answers", answers()),
            ("values", values()),
            ("goodput", goodput()),
            ("lanes", lanes()),
            ("round-trip", round_trip()),
            ("training", training()),
            ("policy", policy()),
            ("saturation", saturation()),
            ("all-reduce", all_reduces()),
            ("frames", frames()),
            ("shapes", shapes()),
            ("switches", switches()),
        ],
    );
}
