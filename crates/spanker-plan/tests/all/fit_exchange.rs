// SPDX-License-Identifier: Apache-2.0
//! Fits of cards whose exchanges grow with their number: which term the samples support, what the bands say
//! where they support none, and the file.

use proptest::prelude::*;
use spanker_model::{Model, Quant, builtin};
use spanker_plan::{CardModel, CardSamples, PlanError};

const SEVEN: &str = "llama-2-7b";

/// The number of cards, the work and, in tables that have it, the transfer.
type Row = (usize, f64, Option<f64>);

fn csv(rows: &[Row]) -> String {
    let apart = rows.iter().any(|row| row.2.is_some());
    let mut text = "model,quant,cards,milliseconds".to_owned();
    text += if apart { ",transfer\n" } else { "\n" };
    for (cards, work, transfer) in rows {
        text += &format!("{SEVEN},q4_0,{cards},{work:?}");
        text += &transfer.map_or(String::new(), |transfer| format!(",{transfer:?}"));
        text += "\n";
    }
    text
}

fn read(rows: &[Row]) -> Result<CardModel, PlanError> {
    CardModel::fit(&CardSamples::from_csv(&csv(rows))?)
}

fn fit(times: &[(usize, f64)]) -> CardModel {
    let rows: Vec<Row> = times.iter().map(|&(cards, time)| (cards, time, None)).collect();
    read(&rows).expect("a fit")
}

fn seven() -> Model {
    builtin(SEVEN, Quant::Q4_0).expect("built in")
}

fn near(found: f64, expected: f64, share: f64) {
    assert!((found / expected - 1.0).abs() <= share, "{found} is not near {expected}");
}

/// What the file says about how exchanges grow.
fn growth(model: &CardModel) -> Option<String> {
    let text = model.to_toml();
    let (_, after) = text.split_once("[exchange]\ngrowth = \"")?;
    Some(after.split('"').next().expect("a name").to_owned())
}

const GROWTHS: [&str; 4] = ["linear", "log", "share", "pairs"];

fn grown(growth: &str, cards: usize) -> f64 {
    let n = cards as f64;
    match growth {
        "linear" => n - 1.0,
        "log" => n.log2(),
        "share" => 2.0 * (n - 1.0) / n,
        "pairs" => n * (n - 1.0) / 2.0,
        other => panic!("{other}"),
    }
}

#[test]
fn two_cards_slower_than_one_make_more_cards_slower_still() {
    let model = fit(&[(1, 100.0), (2, 110.0)]);
    let at = |cards| model.predict(&seven(), cards);
    near(at(1).time.value, 100.0, 1e-6);
    near(at(2).time.value, 110.0, 1e-6);
    // A flat line would say 105 for all of them.
    assert!(at(3).time.value > 130.0 && at(6).time.value > 250.0, "{:?} {:?}", at(3), at(6));
    // Twice the flat line on three cards, four times on six.
    for (cards, measured) in [(3, 210.0), (6, 420.0), (6, 130.0)] {
        let band = at(cards).time;
        assert!(band.low <= measured && measured <= band.high, "{measured} in {band:?}");
    }
    let terms = at(6);
    near(terms.memory_ms + terms.fixed_ms + terms.exchange_ms, terms.time.value, 1e-12);
    let said = model.caveats().join("\n");
    assert!(said.contains("samples have 1 and 2 cards only: how much slower 3 and more"), "{said}");
}

#[test]
fn slowdown_of_any_size_on_two_cards_is_followed_and_survives_its_file() {
    for slower in [1.0, 1.001, 1.3, 2.0, 10.0] {
        let model = fit(&[(1, 20.0), (2, 20.0 * slower)]);
        let at = |cards| model.predict(&seven(), cards).time;
        assert!(at(3).value > at(2).value && at(6).value > at(3).value, "{slower}");
        assert!(at(6).high > 3.0 * at(2).value, "{slower}: {:?}", at(6));
        assert_eq!(CardModel::from_toml(&model.to_toml()), Ok(model));
    }
}

#[test]
fn every_growth_is_recognised_from_four_numbers_of_cards_and_followed_beyond() {
    // Off by up to a percent, as measurements are.
    let wobble = [1.01, 0.99, 1.0, 0.995];
    for name in GROWTHS {
        let exact = |cards: usize| 160.0 / cards as f64 + 12.0 + 25.0 * grown(name, cards);
        let counts = [1, 2, 4, 8].into_iter().zip(wobble);
        let times: Vec<(usize, f64)> = counts.map(|(n, off)| (n, off * exact(n))).collect();
        let model = fit(&times);
        // A share is a fixed cost and less to read: it needs no term of its own.
        let term = Some(name).filter(|name| *name != "share");
        assert_eq!(growth(&model).as_deref(), term, "{}", model.to_toml());
        for cards in [3, 6, 12, 16] {
            let band = model.predict(&seven(), cards).time;
            near(band.value, exact(cards), 0.08);
            assert!(band.low <= exact(cards) && exact(cards) <= band.high, "{name}: {band:?}");
        }
        let shown = model.parameters().iter().any(|shown| shown.name == "exchange.per_layer_ms");
        assert_eq!(shown, term.is_some());
    }
}

#[test]
fn falling_times_on_two_numbers_of_cards_leave_the_term_out_and_the_band_open() {
    let model = fit(&[(1, 101.06), (2, 61.50)]);
    assert_eq!(growth(&model), None);
    let four = model.predict(&seven(), 4);
    assert_eq!(four.exchange_ms, 0.0);
    near(four.time.value, 41.72, 1e-3);
    assert!(four.time.high > 1.5 * four.time.value, "{four:?}");
    let said = model.caveats().join("\n");
    assert!(
        said.contains("samples have 1 and 2 cards only: whether 3 and more are slower"),
        "{said}"
    );
    // A third number of cards answers that: the band closes and the caveat goes.
    let model = fit(&[(1, 101.06), (2, 61.50), (4, 40.25)]);
    let eight = model.predict(&seven(), 8).time;
    assert!(eight.high < 1.5 * eight.value, "{eight:?}");
    assert_eq!(growth(&model), None);
    assert!(!model.caveats().join("\n").contains("cards only"), "{:?}", model.caveats());
    // A model of the links answers it, too.
    let linked = fit(&[(1, 101.06), (2, 61.50)]).without_exchange();
    let closed = linked.predict(&seven(), 4).time;
    assert!(closed.high < 1.2 * closed.value && linked.caveats().is_empty(), "{closed:?}");
}

#[test]
fn three_numbers_of_cards_tell_where_more_stop_to_help() {
    let model = fit(&[(1, 100.0), (2, 60.0), (4, 75.0)]);
    assert_eq!(growth(&model).as_deref(), Some("pairs"));
    let at = |cards| model.predict(&seven(), cards).time;
    assert!(at(8).low > 2.0 * at(4).value, "{:?}", at(8));
    // Another account of the same growth is no other growth.
    assert_eq!(model.caveats(), Vec::<String>::new());
}

#[test]
fn samples_of_one_card_say_that_more_may_be_slower() {
    let table = "model,quant,cards,milliseconds\nllama-2-7b,q4_0,1,100\nllama-2-13b,q4_0,1,190\n";
    let model = CardModel::fit(&CardSamples::from_csv(table).expect("a table")).expect("a fit");
    let band = model.predict(&seven(), 2).time;
    assert!(band.high > 2.0 * band.value, "{band:?}");
    let said = model.caveats().join("\n");
    assert!(said.contains("samples have 1 card only: whether 2 and more"), "{said}");
}

#[test]
fn one_wild_sample_among_many_buys_no_exchange_term() {
    for wild in 0..8 {
        let mut table = "model,quant,cards,milliseconds\n".to_owned();
        for (at, cards) in [1, 2, 4, 8].into_iter().flat_map(|n| [(0, n), (1, n)]).enumerate() {
            let (which, cards) = cards;
            let name = [SEVEN, "llama-2-13b"][which];
            let shape = builtin(name, Quant::Q4_0).expect("built in");
            let work = shape.read_per_token() as f64 / 40e6 / f64::from(cards);
            let time = work + 0.7 * shape.layers.len() as f64;
            table +=
                &format!("{name},q4_0,{cards},{}\n", if at == wild { 3.0 * time } else { time });
        }
        let model =
            CardModel::fit(&CardSamples::from_csv(&table).expect("a table")).expect("a fit");
        assert_eq!(growth(&model), None, "{wild}: {}", model.to_toml());
    }
}

#[test]
fn transfers_of_their_own_leave_the_work_alone() {
    // Published: 7B on 1 to 8 Raspberry Pi 4.
    let rows: [Row; 4] = [
        (1, 1307.94, Some(1.81)),
        (2, 739.0, Some(52.5)),
        (4, 458.81, Some(34.06)),
        (8, 296.69, Some(289.75)),
    ];
    let apart = read(&rows).expect("a fit");
    let work = apart.without_exchange();
    let alone = fit(&rows.map(|(cards, work, _)| (cards, work)));
    assert_eq!(alone.predict(&seven(), 8).exchange_ms, 0.0);
    for cards in [1, 2, 4, 8, 16] {
        let (found, expected) = (work.predict(&seven(), cards), alone.predict(&seven(), cards));
        assert_eq!((found.memory_ms, found.fixed_ms), (expected.memory_ms, expected.fixed_ms));
    }
    let at = |cards| apart.predict(&seven(), cards);
    assert_eq!(at(1).exchange_ms, 0.0);
    assert!(at(8).exchange_ms > at(2).exchange_ms, "{:?} {:?}", at(8), at(2));
    let band = at(8).time;
    assert!(band.low <= 588.19 && 588.19 <= band.high, "{band:?}");
    assert_eq!(CardModel::from_toml(&apart.to_toml()), Ok(apart));
}

#[test]
fn transfer_that_grows_exactly_is_followed_exactly() {
    for name in GROWTHS {
        let row = |n: usize| (n, 100.0 / n as f64 + 5.0, Some(3.0 * grown(name, n)));
        let model = read(&[1, 2, 4, 8].map(row)).expect("a fit");
        assert_eq!(growth(&model).as_deref(), Some(name));
        near(model.predict(&seven(), 6).exchange_ms, 3.0 * grown(name, 6), 1e-6);
    }
    // One number of cards with a transfer tells how much, and not how it grows.
    let model = read(&[(1, 100.0, Some(0.0)), (2, 55.0, Some(7.0))]).expect("a fit");
    let band = model.predict(&seven(), 6).time;
    near(model.predict(&seven(), 2).exchange_ms, 7.0, 1e-9);
    assert!(band.high > 100.0 && band.low < 35.0, "{band:?}");
    // Transfers of nothing are no exchange.
    let model = read(&[(1, 100.0, Some(0.0)), (2, 55.0, Some(0.0))]).expect("a fit");
    assert_eq!(growth(&model), None);
}

fn said<T: std::fmt::Debug>(result: Result<T, PlanError>) -> String {
    match result {
        Err(error @ PlanError::File { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn bad_transfers_and_bad_exchange_fields_are_named_with_their_value() {
    let header = "model,quant,cards,milliseconds,transfer";
    for (cell, expected) in [
        ("-1", "line 2: transfer '-1'"),
        ("nan", "line 2: transfer 'nan'"),
        ("", "line 2: transfer ''"),
        ("1,2", "has 6 columns"),
    ] {
        let table = format!("{header}\nllama-2-7b,q4_0,2,5,{cell}\n");
        let said = said(CardSamples::from_csv(&table));
        assert!(said.contains(expected), "{cell}: {said}");
    }
    let good = fit(&[(1, 100.0), (2, 110.0)]).to_toml();
    let rival = good.find("[[rival]]").expect("a rival");
    for (from, to, expected) in [
        (
            "growth = \"linear\"",
            "growth = \"cubic\"",
            "exchange.growth 'cubic': expected linear, log",
        ),
        ("growth = \"linear\"\n", "", "missing field `growth`"),
        ("card_counts = [1, 2]", "card_counts = [1, 3]", "sampled.card_counts from 1 to 3"),
        ("card_counts = [1, 2]", "card_counts = [-1]", "card_counts"),
        ("kind = \"card\"", "kind = \"card\"\ncolour = 1", "colour"),
    ] {
        assert!(good.contains(from), "{from} in {good}");
        let said = said(CardModel::from_toml(&good.replacen(from, to, 1)));
        assert!(said.contains(expected), "{to}: {said}");
    }
    let negative = good.replacen("[exchange]", "[exchange]\nscale = -1.0", 1);
    assert!(said(CardModel::from_toml(&negative)).contains("exchange.scale -1"));
    let (before, after) = good.split_at(rival);
    let half = format!(
        "{before}[[rival]]\nper_gigabyte_ms = 1.0\nper_layer_ms = 0.0\ngrowth = \"log\"\n{after}"
    );
    assert!(said(CardModel::from_toml(&half)).contains("growth and exchange_per_layer_ms"));
    let many = "[[rival]]\nper_gigabyte_ms = 1.0\nper_layer_ms = 0.0\n".repeat(17);
    assert!(said(CardModel::from_toml(&format!("{before}{many}{after}"))).contains("at most 16"));
}

#[test]
fn file_from_before_there_were_exchanges_is_read_and_predicts_as_before() {
    let old = "# How long a card works on a token, without communication, fitted to measurements.
version = 1
kind = \"card\"
provenance = \"fitted\"

# per_gigabyte_ms (bytes of weights on the card) / 10^9 + per_layer_ms (layers)
[card]
per_gigabyte_ms = 21.288955732335243 # 47 GB/s
per_layer_ms = 0.6849165035532291

# The scale of relative residuals, which the bands follow
[residual]
scale = 0.05

# What the fit has seen; bands widen outside
[sampled]
samples = 2
cards = [1, 2]
layer_bytes = [58103296.0, 116173312.0]
models = [\"llama-2-7b\"]
quants = [\"q4_0\"]
";
    let model = CardModel::from_toml(old).expect("an old file");
    let four = model.predict(&seven(), 4).time;
    near(four.value, 41.72, 1e-3);
    near(four.low, 35.39, 1e-3);
    near(four.high, 49.18, 1e-3);
    assert_eq!(model.caveats(), Vec::<String>::new());
    assert_eq!(CardModel::from_toml(&model.to_toml()), Ok(model));
}

proptest! {
    #[test]
    fn noise_of_three_percent_buys_no_exchange_term(
        per_layer in 0.0..2.0f64,
        off in prop::collection::vec(0.97..1.03f64, 4),
    ) {
        let exact = |n: usize| 100.0 / n as f64 + 32.0 * per_layer;
        let counts = [1, 2, 4, 8].into_iter().zip(off);
        let model = fit(&counts.map(|(n, off)| (n, off * exact(n))).collect::<Vec<_>>());
        prop_assert_eq!(growth(&model), None);
    }

    #[test]
    fn any_card_model_survives_its_file_bit_for_bit(
        rows in prop::collection::vec((1..33usize, -3.0..6.0f64, -3.0..6.0f64), 1..9),
        apart in any::<bool>(),
        cards in 1..1025usize,
    ) {
        let row = |&(n, work, transfer): &(usize, f64, f64)| {
            (n, 10f64.powf(work), apart.then(|| 10f64.powf(transfer)))
        };
        let model = read(&rows.iter().map(row).collect::<Vec<_>>()).expect("a fit");
        let text = model.to_toml();
        let back = CardModel::from_toml(&text).expect("its own file");
        prop_assert_eq!(&back.to_toml(), &text);
        let (written, read) = (model.predict(&seven(), cards), back.predict(&seven(), cards));
        let bits = |time: f64| time.to_bits();
        prop_assert_eq!(bits(written.time.high), bits(read.time.high));
        prop_assert_eq!(bits(written.time.value), bits(read.time.value));
        prop_assert_eq!(&back, &model);
        let band = read.time;
        prop_assert!(band.low > 0.0 && band.low <= band.value, "{:?}", band);
        prop_assert!(band.value <= band.high && band.high.is_finite(), "{:?}", band);
    }
}
