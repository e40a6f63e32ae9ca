// SPDX-License-Identifier: Apache-2.0
//! What fits foresee of published measurements that they have not seen: the tables of `docs/fits.md`.

use spanker_model::{Quant, builtin};
use spanker_plan::{CardModel, CardSamples};
use spanker_test_support::tables::{check, table};

/// Published by distributed-llama for Q4_0: model, cards, and milliseconds of a token's work and transfer.
type Published = (&'static str, usize, f64, f64);

const C3D: [Published; 9] = [
    ("llama-2-7b", 1, 101.06, 0.19),
    ("llama-2-7b", 2, 61.50, 7.62),
    ("llama-2-7b", 4, 40.25, 12.81),
    ("llama-2-13b", 1, 182.88, 0.69),
    ("llama-2-13b", 2, 107.12, 7.81),
    ("llama-2-13b", 4, 66.25, 19.94),
    ("llama-2-70b", 1, 907.25, 1.75),
    ("llama-2-70b", 2, 475.50, 25.00),
    ("llama-2-70b", 4, 264.00, 28.50),
];
const PI_4: [Published; 8] = [
    ("llama-2-7b", 1, 1307.94, 1.81),
    ("llama-2-7b", 2, 739.00, 52.50),
    ("llama-2-7b", 4, 458.81, 34.06),
    ("llama-2-7b", 8, 296.69, 289.75),
    ("llama-2-13b", 2, 1465.06, 30.88),
    ("llama-2-13b", 4, 746.88, 99.50),
    ("llama-2-13b", 8, 460.80, 652.88),
    ("llama-2-70b", 8, 2121.94, 2719.62),
];
const PI_5: [Published; 3] = [
    ("llama-2-7b", 1, 434.84, 5.25),
    ("llama-2-7b", 2, 257.78, 83.27),
    ("llama-2-7b", 4, 163.42, 55.25),
];
const PI_5_LLAMA_3: [Published; 3] = [
    ("llama-3-8b", 1, 556.67, 6.17),
    ("llama-3-8b", 2, 362.73, 80.11),
    ("llama-3-8b", 4, 267.62, 62.34),
];

/// What is sampled, what is asked about, and the largest error of it, in percent: what it was when there were no
/// exchange terms.
struct HoldOut {
    cards: &'static str,
    all: &'static [Published],
    sampled: usize,
    bound: fn(&str, usize) -> f64,
}

const HOLD_OUTS: [HoldOut; 5] = [
    HoldOut { cards: "c3d-highcpu-30", all: &C3D, sampled: 2, bound: |_, _| 3.75 },
    HoldOut { cards: "c3d-highcpu-30", all: &C3D, sampled: 3, bound: |_, _| 2.55 },
    HoldOut { cards: "Raspberry Pi 4", all: &PI_4, sampled: 2, bound: pi_4 },
    HoldOut { cards: "Raspberry Pi 5", all: &PI_5, sampled: 2, bound: |_, _| 3.65 },
    HoldOut { cards: "Raspberry Pi 5", all: &PI_5_LLAMA_3, sampled: 2, bound: |_, _| 0.75 },
];

fn pi_4(model: &str, cards: usize) -> f64 {
    match (model, cards) {
        ("llama-2-70b", 8) => 10.25,
        ("llama-2-13b", 2) => 9.95,
        _ => 6.25,
    }
}

fn fit(samples: &[Published]) -> CardModel {
    let line = |(name, cards, work, _): &Published| format!("{name},q4_0,{cards},{work}\n");
    let rows: String = samples.iter().map(line).collect();
    let table = format!("model,quant,cards,milliseconds\n{rows}");
    CardModel::fit(&CardSamples::from_csv(&table).expect("a table")).expect("a fit")
}

/// The rows of the document's table: every hold-out is inside its band and no further off than it was.
fn rows() -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for HoldOut { cards, all, sampled, bound } in &HOLD_OUTS {
        let (seen, held_out) = all.split_at(*sampled);
        let model = fit(seen);
        let counts: Vec<String> = seen.iter().map(|(_, n, ..)| n.to_string()).collect();
        let seen = format!("{} on {}", seen[0].0, counts.join(", "));
        for (name, n, measured, _) in held_out {
            let shape = builtin(name, Quant::Q4_0).expect("built in");
            let band = model.predict(&shape, *n).time;
            let error = 100.0 * (band.value / measured - 1.0);
            assert!(error.abs() <= bound(name, *n), "{cards}: {name} on {n}: {error} %");
            assert!(band.low <= *measured && *measured <= band.high, "{name} on {n}: {band:?}");
            rows.push(vec![
                (*cards).to_owned(),
                seen.clone(),
                format!("{name} on {n}"),
                format!("{measured:.1}"),
                format!("{:.1} ({:.1} to {:.1})", band.value, band.low, band.high),
                format!("{error:+.1} %"),
            ]);
        }
    }
    rows
}

#[test]
fn hold_outs_are_no_worse_than_without_exchange_terms_and_inside_their_bands() {
    let header = ["cards", "fitted to", "asked about", "measured, ms", "predicted, ms", "error"];
    check("fits.md", &[("hold-outs", table(&header, rows()))]);
}
