// SPDX-License-Identifier: Apache-2.0
//! Fits against published measurements and against data with a known answer.

use proptest::prelude::*;
use spanker_model::{Model, Quant, builtin};
use spanker_plan::{CardModel, CardSamples, LinkModel, LinkSamples, PlanError};

const KI: u64 = 1024;

/// Published all-reduces in microseconds: bytes, then times on 2, 4 and 8 ranks.
type Published = [(u64, [f64; 3]); 5];
const A100: Published = [
    (8 * KI, [11.0, 14.7, 21.3]),
    (16 * KI, [12.8, 16.3, 22.6]),
    (64 * KI, [13.0, 17.8, 28.1]),
    (1024 * KI, [40.8, 29.8, 38.9]),
    (16384 * KI, [128.0, 184.0, 217.0]),
];
const RTX_PRO_6000: Published = [
    (8 * KI, [6.8, 13.5, 26.7]),
    (16 * KI, [7.4, 14.7, 27.0]),
    (64 * KI, [9.2, 16.9, 34.2]),
    (1024 * KI, [44.4, 86.1, 131.5]),
    (16384 * KI, [474.0, 1008.0, 1248.0]),
];

type Row = (usize, u64, f64);

fn csv(rows: &[Row]) -> String {
    let line = |(ranks, bytes, time): &Row| format!("{ranks},{bytes},{time:?}\n");
    "ranks,bytes,microseconds\n".to_owned() + &rows.iter().map(line).collect::<String>()
}

fn fit(rows: &[Row]) -> LinkModel {
    LinkModel::fit(&LinkSamples::from_csv(&csv(rows)).expect("a table")).expect("a fit")
}

fn on_two_and_four(table: &Published) -> Vec<Row> {
    let rows = table.iter().map(|&(bytes, [two, four, _])| [(2, bytes, two), (4, bytes, four)]);
    rows.flatten().collect()
}

fn parameter(model: &LinkModel, name: &str) -> f64 {
    let all = model.parameters();
    all.iter().find(|parameter| parameter.name == name).expect("a parameter").value
}

fn near(found: f64, expected: f64, share: f64) {
    assert!((found / expected - 1.0).abs() <= share, "{found} is not near {expected}");
}

#[test]
fn published_links_have_the_known_parameters() {
    for (table, base, per_rank, per_byte) in
        [(&A100, 9.578, 1.741, 1.1965e-5), (&RTX_PRO_6000, 3.557, 3.165, 1.7106e-5)]
    {
        let model = fit(&on_two_and_four(table));
        near(parameter(&model, "small.base_us"), base, 1e-3);
        near(parameter(&model, "small.per_rank_us"), per_rank, 1e-3);
        near(parameter(&model, "small.per_byte_us"), per_byte, 1e-3);
        assert_eq!(parameter(&model, "small.exponent"), 1.0);
        assert_eq!((model.rejected(), model.caveats()), (None, Vec::new()));
    }
}

#[test]
fn eight_ranks_are_foreseen_from_two_and_four() {
    // What the small form alone gives; the large form has a say of 2 % at 64 KiB.
    for (table, expected) in
        [(&A100, [22.55, 23.33, 28.04]), (&RTX_PRO_6000, [26.83, 27.96, 34.68])]
    {
        let model = fit(&on_two_and_four(table));
        let mut errors = Vec::new();
        for (&(bytes, [_, _, measured]), expected) in table.iter().zip(expected) {
            let band = model.predict(8, bytes);
            near(band.value, expected, 0.02);
            assert!(band.low <= measured && measured <= band.high, "{measured} in {band:?}");
            errors.push((band.value / measured - 1.0).abs());
        }
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        assert!(mean < 0.05, "mean error {mean}");
    }
}

#[test]
fn published_large_messages_are_inside_the_bands_of_eight_ranks() {
    for table in [&A100, &RTX_PRO_6000] {
        let model = fit(&on_two_and_four(table));
        for &(bytes, [.., measured]) in &table[3..] {
            let band = model.predict(8, bytes);
            assert!(band.low <= measured && measured <= band.high, "{measured} in {band:?}");
        }
    }
}

#[test]
fn bands_widen_away_from_the_samples() {
    let model = fit(&on_two_and_four(&A100));
    let width = |ranks, bytes| {
        let band = model.predict(ranks, bytes);
        assert!((band.low * band.high / band.value.powi(2) - 1.0).abs() < 1e-9, "{band:?}");
        band.high / band.value
    };
    assert_eq!(width(2, 8 * KI), width(4, 8 * KI));
    assert!(width(3, 8 * KI) < width(8, 8 * KI) && width(8, 8 * KI) < width(16, 8 * KI));
    assert!(width(4, 1 << 24) < width(4, 1 << 26));
    assert!(width(4, 8 * KI) < width(4, KI) && width(4, KI) < 1.5);
    assert!(width(4, 8 * KI) >= (1.645f64 * 0.05).exp());
    assert!(width(1024, 1 << 50) <= 1000.0);
}

#[test]
fn one_rank_alone_takes_no_time() {
    let band = fit(&on_two_and_four(&A100)).predict(1, 8 * KI);
    assert_eq!((band.value, band.low, band.high), (0.0, 0.0, 0.0));
}

#[test]
fn samples_of_one_rank_count_say_so_and_leave_the_others_wide() {
    let rows: Vec<Row> = [4, 8, 16].map(|k| (2, k * KI, 5.0 + k as f64 / 16.0)).to_vec();
    let model = fit(&rows);
    assert_eq!(parameter(&model, "small.per_rank_us"), 0.0);
    near(model.predict(2, 8 * KI).value, 5.5, 1e-6);
    let wide = model.predict(8, 8 * KI);
    assert!(wide.high > 3.0 * wide.value, "{wide:?}");
    let caveats = model.caveats();
    assert!(caveats.len() == 1 && caveats[0].contains("2 ranks"), "{caveats:?}");
}

#[test]
fn samples_of_one_size_say_so_and_leave_the_others_wide() {
    let model = fit(&[(2, 8 * KI, 6.0), (4, 8 * KI, 12.0), (8, 8 * KI, 24.0)]);
    assert_eq!(parameter(&model, "small.per_byte_us"), 0.0);
    near(model.predict(6, 8 * KI).value, 18.0, 1e-6);
    let wide = model.predict(8, 64 * KI);
    assert!(wide.high > 3.0 * wide.value, "{wide:?}");
    assert!(model.caveats()[0].contains("8192 bytes"), "{:?}", model.caveats());
    // Two measurements of the same thing are a fit, too, with both caveats.
    let model = fit(&[(2, 8 * KI, 6.0), (2, 8 * KI, 6.1)]);
    near(model.predict(2, 8 * KI).value, 6.05, 0.01);
    assert_eq!(model.caveats().len(), 2);
}

#[test]
fn links_that_contend_get_an_exponent() {
    let time = |n: usize, bytes: u64| 4.0 + (n - 1) as f64 + 1e-5 * (n * n) as f64 * bytes as f64;
    let sizes = [8, 16, 32, 64, 128].map(|k| k * KI);
    let rows: Vec<Row> =
        sizes.iter().flat_map(|&s| [2, 4, 8].map(|n| (n, s, time(n, s)))).collect();
    let model = fit(&rows);
    assert_eq!(parameter(&model, "small.exponent"), 2.0);
    near(model.predict(6, 64 * KI).value, time(6, 64 * KI), 0.01);
}

#[test]
fn a_wild_sample_is_rejected_and_named() {
    let mut rows = on_two_and_four(&RTX_PRO_6000);
    rows[3].2 *= 3.0;
    let model = fit(&rows);
    let rejected = model.rejected().expect("a rejected sample");
    assert_eq!((rejected.ranks, rejected.bytes, rejected.microseconds), rows[3]);
    near(model.predict(8, 8 * KI).value, 26.7, 0.05);
    let text = model.to_toml();
    assert!(text.contains("[rejected]"), "{text}");
    assert_eq!(LinkModel::from_toml(&text), Ok(model));
}

/// What an error says about a table or a file.
fn said<T: std::fmt::Debug>(result: Result<T, PlanError>) -> String {
    match result {
        Err(error @ PlanError::File { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn tables_may_have_comments_spaces_and_empty_lines() {
    let text = "\u{feff}# from a run\r\n ranks , bytes,microseconds\r\n\r\n2, 8192 ,6.8\r\n# mid\r\n4,8192,1.35e1\r\n";
    let samples = LinkSamples::from_csv(text).expect("a table");
    assert_eq!(samples.samples().len(), 2);
    assert_eq!(samples.samples()[1].microseconds, 13.5);
}

#[test]
fn bad_link_tables_name_line_column_and_value() {
    let header = "ranks,bytes,microseconds";
    for (text, expected) in [
        (String::new(), "the table is empty"),
        ("ranks,bytes\n2,8".into(), "line 1: header 'ranks,bytes'"),
        (format!("{header}\n"), "0 samples"),
        (format!("{header}\n2,8192,6.8"), "1 samples"),
        (format!("{header}\n2,8192\n"), "line 2: '2,8192' has 2 columns"),
        (format!("{header}\n2,8192,6.8,1\n"), "line 2: '2,8192,6.8,1' has 4 columns"),
        (format!("{header}\n\n1,8192,6.8\n"), "line 3: ranks '1'"),
        (format!("{header}\n9999,8192,6.8\n"), "line 2: ranks '9999'"),
        (format!("{header}\ntwo,8192,6.8\n"), "line 2: ranks 'two'"),
        (format!("{header}\n2,0,6.8\n"), "line 2: bytes '0'"),
        (format!("{header}\n2,-8,6.8\n"), "line 2: bytes '-8'"),
        (format!("{header}\n2,99999999999999999999,6.8\n"), "line 2: bytes '9999"),
        (format!("{header}\n2,8192,0\n"), "line 2: microseconds '0'"),
        (format!("{header}\n2,8192,-1\n"), "line 2: microseconds '-1'"),
        (format!("{header}\n2,8192,NaN\n"), "line 2: microseconds 'NaN'"),
        (format!("{header}\n2,8192,inf\n"), "line 2: microseconds 'inf'"),
        (format!("{header}\n2,8192,1e400\n"), "line 2: microseconds '1e400'"),
        (format!("{header}\n2,8192,\x1b[2J\n"), "line 2: microseconds '\\u{1b}[2J'"),
    ] {
        let said = said(LinkSamples::from_csv(&text));
        assert!(said.contains(expected), "{text:?}: {said}");
    }
}

#[test]
fn bad_link_files_name_the_field_and_the_value() {
    let good = fit(&on_two_and_four(&A100)).to_toml();
    let line = |start: &str| {
        let found = good.lines().find(|line| line.starts_with(start)).expect("a line");
        found.to_owned()
    };
    for (from, to, expected) in [
        (line("per_rank_us"), "per_rank_us = -1.0", "small.per_rank_us -1"),
        (line("base_us"), "base_us = nan", "small.base_us NaN"),
        (line("base_us"), "base_us = inf", "small.base_us inf"),
        (line("base_us"), "base_us = \"x\"", "'base_us = \"x\"': invalid type"),
        (line("per_hop_us"), "per_hop_us = -0.5", "large.per_hop_us -0.5"),
        (line("per_rank_us"), "", "missing field `per_rank_us`"),
        (line("exponent"), "exponent = 99.0", "small.exponent 99"),
        (line("small ="), "small = -0.1", "residual.small -0.1"),
        (line("ranks"), "ranks = [4, 2]", "sampled.ranks [4, 2]"),
        (line("ranks"), "ranks = [0, 2]", "sampled.ranks [0, 2]"),
        (line("version"), "version = 9", "version 9, expected 1"),
        (line("version"), "", "version is missing"),
        (line("kind"), "kind = \"card\"", "kind 'card': expected a fit of kind 'link'"),
        (line("kind"), "", "kind is missing"),
        (line("provenance"), "provenance = \"guessed\"", "guessed"),
        (line("samples"), "colour = 1", "colour"),
    ] {
        let said = said(LinkModel::from_toml(&good.replacen(&from, to, 1)));
        assert!(said.contains(expected), "{to}: {said}");
    }
    for text in ["", "\0", "version = ", "kind = \"link\"\nversion = 1"] {
        said(LinkModel::from_toml(text));
    }
}

fn cards(rows: &[(&str, usize, f64)]) -> CardModel {
    let line = |(model, cards, time): &(&str, usize, f64)| format!("{model},q4_0,{cards},{time}\n");
    let text =
        "model,quant,cards,milliseconds\n".to_owned() + &rows.iter().map(line).collect::<String>();
    CardModel::fit(&CardSamples::from_csv(&text).expect("a table")).expect("a fit")
}

fn q4_0(name: &str) -> Model {
    builtin(name, Quant::Q4_0).expect("built in")
}

#[test]
fn four_cards_are_foreseen_from_one_and_two() {
    for (name, one, two, four) in [
        ("llama-2-7b", 101.06, 61.50, 40.25),
        ("llama-2-7b", 434.84, 257.78, 163.42),
        ("llama-3-8b", 556.67, 362.73, 267.62),
    ] {
        let model = cards(&[(name, 1, one), (name, 2, two)]);
        let found = model.predict(&q4_0(name), 4);
        near(found.time.value, four, 0.05);
        near(found.memory_ms + found.fixed_ms, found.time.value, 1e-12);
        assert!(found.time.low <= four && four <= found.time.high, "{four} in {found:?}");
        near(model.predict(&q4_0(name), 1).time.value, one, 1e-9);
        let caveats = model.caveats();
        assert!(caveats.len() == 1 && caveats[0].contains("1 and 2 cards only"), "{caveats:?}");
    }
}

#[test]
fn a_large_model_is_foreseen_from_a_small_one() {
    let model = cards(&[("llama-2-7b", 1, 101.06), ("llama-2-7b", 2, 61.50)]);
    for (cards, measured) in [(1, 907.25), (2, 475.5), (4, 264.0)] {
        let found = model.predict(&q4_0("llama-2-70b"), cards).time;
        near(found.value, measured, 0.1);
        assert!(found.low <= measured && measured <= found.high, "{measured} in {found:?}");
    }
}

#[test]
fn a_card_gives_a_planner_its_rate_and_its_fixed_cost() {
    let shape = q4_0("llama-2-7b");
    let time = |share: f64| shape.read_per_token() as f64 * share / 40e9 * 1e3 + 32.0 * 0.07;
    // Norms are not shared, so half of the bytes is not quite half of the time.
    let model = cards(&[("llama-2-7b", 1, time(1.0)), ("llama-2-7b", 2, time(0.5))]);
    near(model.memory_bandwidth().0 as f64, 40e9, 1e-3);
    // Four products and attention share the 70 us of a layer.
    near(model.per_operator().0, 14e-6, 0.02);
}

#[test]
fn a_single_sample_is_all_memory_with_a_wide_band_that_says_why() {
    let model = cards(&[("llama-2-7b", 1, 100.0)]);
    let here = model.predict(&q4_0("llama-2-7b"), 1);
    near(here.time.value, 100.0, 1e-9);
    assert_eq!(here.fixed_ms, 0.0);
    let there = model.predict(&q4_0("llama-2-7b"), 4).time;
    assert!(there.high > 2.0 * there.value, "{there:?}");
    assert!(model.caveats()[0].contains("fixed cost is unknown"), "{:?}", model.caveats());
}

#[test]
fn more_bytes_that_are_no_slower_on_one_card_leave_a_fixed_cost_and_say_so() {
    let model = cards(&[("llama-2-7b", 1, 100.0), ("llama-2-13b", 1, 100.0)]);
    let found = model.predict(&q4_0("llama-2-7b"), 1);
    assert_eq!((found.memory_ms, found.exchange_ms), (0.0, 0.0));
    near(found.time.value, 100.0, 0.15);
    assert!(model.caveats()[0].contains("more bytes took no longer"), "{:?}", model.caveats());
    assert_eq!(CardModel::from_toml(&model.to_toml()), Ok(model));
}

#[test]
fn another_type_than_sampled_has_a_wider_band() {
    let model = cards(&[("llama-2-7b", 1, 101.06), ("llama-2-7b", 2, 61.50)]);
    let width = |quant| {
        let time = model.predict(&builtin("llama-2-7b", quant).expect("built in"), 2).time;
        time.high / time.value
    };
    assert!(width(Quant::F16) > width(Quant::Q4_0));
}

#[test]
fn another_model_than_sampled_has_a_wider_band() {
    let model = cards(&[("llama-2-7b", 1, 101.06), ("llama-2-7b", 2, 61.50)]);
    let mut other = q4_0("llama-2-7b");
    let width = |shape: &Model| {
        let time = model.predict(shape, 2).time;
        time.high / time.value
    };
    let known = width(&other);
    other.name = "other".into();
    assert!(width(&other) > known);
}

#[test]
fn a_model_with_quotes_in_its_name_survives_its_file() {
    let table = "model,quant,cards,milliseconds\nmine,q4_0,1,5\n";
    let samples = CardSamples::from_csv_with(table, |_, quant| {
        let mut shape = builtin("llama-2-7b", quant)?;
        shape.name = r#"say "\u0041" \ ü"#.into();
        Ok::<_, spanker_model::ModelError>(shape)
    });
    let model = CardModel::fit(&samples.expect("a table")).expect("a fit");
    assert_eq!(CardModel::from_toml(&model.to_toml()), Ok(model));
}

#[test]
fn keys_and_values_are_not_split_below_a_head() {
    // 8 KV heads: on 16 cards each card still holds one head's keys and values.
    let model = cards(&[("llama-3-8b", 1, 100.0)]);
    let shape = q4_0("llama-3-8b");
    let (eight, sixteen) =
        (model.predict(&shape, 8).memory_ms, model.predict(&shape, 16).memory_ms);
    assert!(sixteen > eight / 2.0 * 1.02, "{sixteen} {eight}");
    near(model.predict(&shape, 1).memory_ms, 100.0, 1e-9);
}

#[test]
fn bad_card_tables_name_line_column_and_value() {
    let header = "model,quant,cards,milliseconds";
    for (text, expected) in [
        ("model,cards\n".to_owned(), "line 1: header"),
        (format!("{header}\n"), "0 samples"),
        (format!("{header}\nllama-9,q4_0,1,1\n"), "line 2: model 'llama-9': unknown model"),
        (format!("{header}\nllama-2-7b,q9,1,1\n"), "line 2: quant 'q9'"),
        (format!("{header}\nllama-2-7b,q4_0,0,1\n"), "line 2: cards '0'"),
        (format!("{header}\nllama-2-7b,q4_0,1,-2\n"), "line 2: milliseconds '-2'"),
        (format!("{header}\nllama-2-7b,q4_0,1\n"), "has 3 columns"),
    ] {
        let said = said(CardSamples::from_csv(&text));
        assert!(said.contains(expected), "{text:?}: {said}");
    }
    let mut asked = 0;
    let text = format!("{header}\nmine,q4_0,1,2\nmine,q4_0,2,1\nyours,q4_0,2,1\n");
    let found = CardSamples::from_csv_with(&text, |name, quant| {
        asked += 1;
        if name == "mine" {
            Ok(builtin("llama-2-7b", quant).expect("built in"))
        } else {
            Err("not here")
        }
    });
    assert!(said(found).contains("line 4: model 'yours': not here"));
    assert_eq!(asked, 2, "a model is looked up once");
}

#[test]
fn bad_card_files_name_the_field_and_the_value() {
    let good = cards(&[("llama-2-7b", 1, 100.0), ("llama-2-7b", 2, 60.0)]).to_toml();
    assert!(CardModel::from_toml(&good).is_ok());
    for (field, to, expected) in [
        ("per_gigabyte_ms", "per_gigabyte_ms = -1", "card.per_gigabyte_ms -1"),
        ("per_gigabyte_ms", "per_gigabyte_ms = nan", "card.per_gigabyte_ms NaN"),
        ("per_layer_ms", "per_layer_ms = -0.5", "card.per_layer_ms -0.5"),
        ("per_layer_ms", "", "missing field `per_layer_ms`"),
        ("scale", "scale = 11", "residual.scale 11"),
        ("cards", "cards = [0, 1]", "sampled.cards [0, 1]"),
        ("layer_bytes", "layer_bytes = [2.0, 1.0]", "sampled.layer_bytes [2, 1]"),
        ("layer_bytes", "layer_bytes = [nan, 1.0]", "sampled.layer_bytes NaN"),
        ("quants", "quants = [\"q9\"]", "q9"),
        ("kind", "kind = \"link\"", "expected a fit of kind 'card'"),
    ] {
        let line = good.lines().find(|line| line.starts_with(field)).expect("a line");
        let said = said(CardModel::from_toml(&good.replacen(line, to, 1)));
        assert!(said.contains(expected), "{to}: {said}");
    }
}

/// Parameters of a link: base, per rank, per byte.
fn link() -> impl Strategy<Value = (f64, f64, f64)> {
    (0.5..50.0f64, 0.1..10.0f64, 1e-6..1e-4f64)
}

fn exact((base, per_rank, per_byte): (f64, f64, f64), ranks: usize, bytes: u64) -> f64 {
    base + per_rank * (ranks - 1) as f64 + per_byte * ranks as f64 * bytes as f64
}

fn rows_of(link: (f64, f64, f64)) -> Vec<Row> {
    let sizes = [4, 8, 32, 64, 128].map(|k| k * KI);
    sizes.iter().flat_map(|&size| [2, 4].map(|n| (n, size, exact(link, n, size)))).collect()
}

proptest! {
    #[test]
    fn an_exact_link_is_recovered(link in link()) {
        let model = fit(&rows_of(link));
        prop_assert!(model.rejected().is_none());
        for (ranks, bytes) in [(2, 4 * KI), (8, 8 * KI), (16, 64 * KI)] {
            near(model.predict(ranks, bytes).value, exact(link, ranks, bytes), 1e-6);
        }
    }

    #[test]
    fn one_wild_sample_moves_no_prediction_far(link in link(), wild in 0..10usize) {
        let mut rows = rows_of(link);
        rows[wild].2 *= 3.0;
        let model = fit(&rows);
        for (ranks, bytes) in [(2, 8 * KI), (4, 64 * KI), (8, 8 * KI), (8, 64 * KI)] {
            near(model.predict(ranks, bytes).value, exact(link, ranks, bytes), 0.1);
        }
    }

    #[test]
    fn times_that_are_scaled_scale_the_predictions(
        times in prop::collection::vec(1.0..100.0f64, 10),
        scale in 1e-3..1e3f64,
    ) {
        let mut rows = rows_of((1.0, 1.0, 1e-5));
        rows[8].1 = 1 << 20;
        rows[9].1 = 1 << 22;
        for (row, time) in rows.iter_mut().zip(times) {
            row.2 = time;
        }
        let model = fit(&rows);
        rows.iter_mut().for_each(|row| row.2 *= scale);
        let scaled = fit(&rows);
        for (ranks, bytes) in [(2, 4 * KI), (8, 64 * KI), (8, 1 << 21)] {
            let (before, after) = (model.predict(ranks, bytes), scaled.predict(ranks, bytes));
            near(after.value, before.value * scale, 1e-6);
            near(after.high, before.high * scale, 1e-6);
        }
    }

    #[test]
    fn a_model_survives_its_file(times in prop::collection::vec(1.0..100.0f64, 2..12)) {
        let rows: Vec<Row> = times
            .iter()
            .enumerate()
            .map(|(at, &time)| (2 + at % 3, 1 << (10 + at), time))
            .collect();
        let model = fit(&rows);
        let read = LinkModel::from_toml(&model.to_toml()).expect("its own file");
        for (ranks, bytes) in [(2, 100), (3, 64 * KI), (64, 1 << 30)] {
            let (written, read) = (model.predict(ranks, bytes), read.predict(ranks, bytes));
            for (written, read) in
                [(written.value, read.value), (written.low, read.low), (written.high, read.high)]
            {
                prop_assert!(written > 0.0 && written.is_finite());
                near(read, written, 1e-12);
            }
        }
    }

    #[test]
    fn a_card_is_recovered_scales_and_survives_its_file_and_a_wild_sample(
        rate in 1e9..1e12f64,
        per_layer in 0.0..2.0f64,
        wild in 0..8usize,
    ) {
        let truth = cards(&[("llama-2-7b", 1, 1e12 / rate)]);
        let shapes = ["llama-2-7b", "llama-2-13b"].map(q4_0);
        let exact = |shape: &Model, cards: usize| {
            truth.predict(shape, cards).memory_ms + per_layer * shape.layers.len() as f64
        };
        let grid = [1, 2, 4, 8].into_iter().flat_map(|n| [(0, n), (1, n)]);
        let rows: Vec<(&str, usize, f64)> = grid
            .map(|(at, n)| (["llama-2-7b", "llama-2-13b"][at], n, exact(&shapes[at], n)))
            .collect();
        let model = cards(&rows);
        let large = q4_0("llama-2-70b");
        let found = model.predict(&large, 8).time;
        near(found.value, exact(&large, 8), 1e-6);
        let read = CardModel::from_toml(&model.to_toml()).expect("its own file");
        near(read.predict(&large, 8).time.high, found.high, 1e-12);
        let twice: Vec<_> = rows.iter().map(|&(name, n, time)| (name, n, 2.0 * time)).collect();
        near(cards(&twice).predict(&large, 8).time.value, 2.0 * found.value, 1e-6);
        let mut spoilt = rows.clone();
        spoilt[wild].2 *= 3.0;
        for (shape, n) in [(&shapes[0], 1), (&shapes[1], 8), (&large, 4)] {
            near(cards(&spoilt).predict(shape, n).time.value, exact(shape, n), 0.1);
        }
    }

    #[test]
    fn random_text_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), line in 0..9usize) {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let table = format!("ranks,bytes,microseconds\n{text}");
        let cards = format!("model,quant,cards,milliseconds\n{text}");
        let file = fit(&on_two_and_four(&A100)).to_toml();
        let broken: Vec<&str> = file.lines().take(line).chain([text.as_str()]).collect();
        for text in [&text, &table, &cards, &broken.join("\n")] {
            let _ = LinkSamples::from_csv(text).and_then(|samples| LinkModel::fit(&samples));
            let _ = CardSamples::from_csv(text).and_then(|samples| CardModel::fit(&samples));
            let _ = LinkModel::from_toml(text);
            let _ = CardModel::from_toml(text);
        }
    }

    #[test]
    fn any_legal_table_gives_a_model_with_finite_bands(
        rows in prop::collection::vec((2..1025usize, 0..51u32, -9.0..15.0f64), 2..20),
        ranks in 2..1025usize,
        shift in 0..51u32,
    ) {
        let rows: Vec<Row> =
            rows.into_iter().map(|(n, shift, log)| (n, 1 << shift, 10f64.powf(log))).collect();
        let band = fit(&rows).predict(ranks, 1 << shift);
        prop_assert!(band.low > 0.0 && band.low <= band.value, "{band:?}");
        prop_assert!(band.value <= band.high && band.high.is_finite(), "{band:?}");
    }
}
