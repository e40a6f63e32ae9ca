// SPDX-License-Identifier: Apache-2.0
//! Simulated links carry what `Framing::goodput` says, and spend what it says on replays.

use spanker_link::CONTROL_BYTES;
use spanker_link::sim::{Case, Wire, run};
use spanker_topology::{BytesPerSecond, Framing, Seconds};

const RAW: BytesPerSecond = BytesPerSecond(500_000_000);
/// From the end of a broken frame to the end of the request for it: what the formula counts from.
const ROUND_TRIP_NS: u64 = 1_520;
const PAYLOADS: [u16; 5] = [256, 512, 1024, 2048, 4096];

/// A wire whose round trip, with the request itself, is the formula's.
fn wire(bit_error_rate: f64) -> Wire {
    let request = CONTROL_BYTES as u64 * 1_000_000_000 / RAW.0;
    Wire { bit_error_rate, ..Wire::clean((ROUND_TRIP_NS - request) / 2) }
}

/// One line of a table: bytes of payload per second.
struct Row {
    payload: u16,
    measured: f64,
    /// By the formula ...
    computed: f64,
    /// ... and if every request waited for one whole frame that travels the same way.
    behind_a_frame: f64,
}

fn measure(payload: u16, bit_error_rate: f64, both_ways: bool, frames: u64) -> Row {
    let back = if both_ways { frames } else { 0 };
    let case = Case {
        wires: [wire(bit_error_rate); 2],
        frames: [frames, back],
        ..Case::one_way(u64::from(payload), payload, 0, frames)
    };
    let report = run(&case).unwrap_or_else(|flaw| panic!("{flaw}"));
    assert_eq!(report.delivered, [back, frames], "{case:?}");
    let framing = Framing::SPANKER.with_payload(u64::from(payload));
    let frame = (framing.payload + framing.overhead) as f64 / RAW.0 as f64;
    let formula = |wait: f64| {
        framing.goodput(RAW, bit_error_rate, Seconds(ROUND_TRIP_NS as f64 * 1e-9 + wait))
    };
    Row {
        payload,
        measured: report.bytes[1] as f64 / report.seconds,
        computed: formula(0.0),
        behind_a_frame: formula(frame),
    }
}

/// Runs all payloads and prints the table; all of it is in the message of a failure.
fn table(bit_error_rate: f64, frames: u64, both_ways: bool) -> (Vec<Row>, String) {
    let rows: Vec<Row> = PAYLOADS
        .iter()
        .map(|&payload| measure(payload, bit_error_rate, both_ways, frames))
        .collect();
    let lines = rows.iter().map(|row| {
        let Row { payload, measured, computed, .. } = row;
        let off = 100.0 * (measured / computed - 1.0);
        let (measured, computed) = (measured / 1e6, computed / 1e6);
        format!("\n{payload:5} B: {measured:.2} MB/s, formula {computed:.2} ({off:+.2} %)")
    });
    let text = format!(
        "bit error rate {bit_error_rate:e}, both ways {both_ways}:{}",
        lines.collect::<String>()
    );
    println!("{text}");
    (rows, text)
}

fn check(bit_error_rate: f64, frames: u64, both_ways: bool) {
    let (rows, text) = table(bit_error_rate, frames, both_ways);
    for row in rows {
        assert!((row.measured / row.computed - 1.0).abs() <= 0.02, "{text}");
    }
}

#[test]
fn goodput_of_clean_wires_is_the_formulas() {
    check(0.0, 10_000, false);
    check(0.0, 10_000, true);
}

#[test]
fn goodput_at_1e_7_is_the_formulas() {
    check(1e-7, 20_000, false);
    check(1e-7, 20_000, true);
}

#[test]
fn goodput_at_1e_6_is_the_formulas() {
    check(1e-6, 20_000, false);
    check(1e-6, 20_000, true);
}

#[test]
fn goodput_at_1e_5_is_the_formulas() {
    check(1e-5, 100_000, false);
}

#[test]
fn goodput_at_1e_5_both_ways_lies_between_the_formula_and_a_frame_more() {
    let (rows, text) = table(1e-5, 50_000, true);
    for row in rows {
        assert!(row.measured <= 1.02 * row.computed, "{text}");
        assert!(row.measured >= 0.98 * row.behind_a_frame, "{text}");
    }
}
