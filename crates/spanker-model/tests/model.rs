// SPDX-License-Identifier: Apache-2.0
//! Models: what follows from their sizes, the check of them, and their way through JSON.

use proptest::prelude::*;
use serde_json::{Value, json};
use spanker_model::{MAX_LAYERS, Model, Quant, builtin, builtin_names};

fn any_quant() -> impl Strategy<Value = Quant> {
    prop::sample::select(Quant::ALL.to_vec())
}

fn tiny() -> Model {
    builtin("tinyllama-1.1b", Quant::Q4_0).expect("built in")
}

fn invalid(change: impl Fn(&mut Model)) -> String {
    let mut model = tiny();
    change(&mut model);
    model.validate().expect_err("an invalid model").to_string()
}

#[test]
fn smollm2_is_as_large_as_its_published_file() {
    // SmolLM2-135M-Instruct.Q4_1.gguf: all of its 98,362,432 bytes but a header of 1,785,664.
    let mut model = builtin("smollm2-135m", Quant::Q4_1).expect("built in");
    model.embedding.quant = Quant::Q8_0;
    model.head.quant = Quant::Q8_0;
    model.validate().expect("a valid model");
    assert_eq!(model.weight_bytes(), 98_362_432 - 1_785_664);
    assert_eq!(model.read_per_token(), model.weight_bytes());
    assert_eq!(model.kv_bytes_per_token(Quant::F16), 30 * 2 * 3 * 64 * 2);
    assert_eq!(model.kv_bytes_per_token(Quant::Q8_0), 30 * 2 * 6 * 34);
}

#[test]
fn embedding_that_is_not_the_head_is_stored_but_not_read() {
    let model = tiny();
    assert_eq!(model.weight_bytes() - model.read_per_token(), 32000 * 2048 / 32 * 18);
    assert_eq!(model.layers[0].weights(), 2048 * (2048 + 256 + 256 + 2048 + 3 * 5632));
    assert_eq!(model.layers[0].other_bytes, 2 * 2048 * 4);
    let names: Vec<&str> = model.layers[0].matrices().iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["q", "k", "v", "o", "gate", "up", "down"]);
}

#[test]
fn type_that_does_not_divide_a_row_is_replaced_like_in_llama_cpp() {
    let model = builtin("smollm2-135m", Quant::Q4K).expect("built in");
    // 576 columns are not whole blocks of 256, 1536 are.
    assert_eq!((model.layers[0].q.quant, model.layers[0].down.quant), (Quant::Q5_0, Quant::Q4K));
    assert_eq!(model.embedding.quant, Quant::Q5_0);
}

#[test]
fn inconsistent_models_are_errors_that_name_the_part() {
    for (expected, error) in [
        ("hidden: 0 is not between 1 and 4194304", invalid(|model| model.hidden = 0)),
        ("layers: 0 is not between 1 and 4096", invalid(|model| model.layers.clear())),
        ("kv_heads: 5 do not divide 32 heads", invalid(|model| model.kv_heads = 5)),
        (
            "heads x head_size: 134217728 is not between 1 and 4194304",
            invalid(|model| model.head_size = 1 << 22),
        ),
        (
            "layer 3 k: 257 x 2048, expected 256 x 2048",
            invalid(|model| model.layers[3].k.rows = 257),
        ),
        (
            "layer 21 down: 2048 x 5632, expected 2048 x 5633",
            invalid(|model| {
                model.ffn = 5633;
                for layer in &mut model.layers {
                    (layer.gate.rows, layer.up.rows, layer.down.cols) = (5633, 5633, 5633);
                    layer.down.quant = Quant::F16;
                }
                model.layers[21].down.cols = 5632;
            }),
        ),
        (
            "embedding: 31999 x 2048, expected 32000 x 2048",
            invalid(|model| model.embedding.rows = 31999),
        ),
        (
            "head: tied, but stored as f16 and the embedding as q4_0",
            invalid(|model| (model.tied, model.head.quant) = (true, Quant::F16)),
        ),
        (
            "layer 0 other_bytes: 18446744073709551615 is more than 1099511627776",
            invalid(|model| model.layers[0].other_bytes = u64::MAX),
        ),
        (
            "name: 'a\\nb' is not 1 to 256 bytes of printable text",
            invalid(|model| model.name = "a\nb".into()),
        ),
        (
            "layer 0 gate: rows of 96 are not whole q4_k blocks of 256",
            invalid(|model| {
                model.hidden = 96;
                for layer in &mut model.layers {
                    (layer.q.cols, layer.k.cols, layer.v.cols, layer.o.rows) = (96, 96, 96, 96);
                    (layer.gate.cols, layer.up.cols, layer.down.rows) = (96, 96, 96);
                    layer.gate.quant = Quant::Q4K;
                }
            }),
        ),
    ] {
        assert_eq!(error, expected);
    }
}

#[test]
fn runs_of_equal_layers_are_stored_once_in_order() {
    let mut model = tiny();
    model.layers[2].v.quant = Quant::Q6K;
    let value = serde_json::to_value(&model).expect("JSON");
    let counts: Vec<&Value> =
        value["layers"].as_array().expect("runs").iter().map(|run| &run["count"]).collect();
    assert_eq!(counts, [&json!(2), &json!(1), &json!(19)]);
    assert_eq!(serde_json::from_value::<Model>(value).expect("valid"), model);
}

#[test]
fn hostile_json_is_an_error_before_anything_is_expanded() {
    let good = serde_json::to_value(tiny()).expect("JSON");
    let error = |change: &dyn Fn(&mut Value)| {
        let mut value = good.clone();
        change(&mut value);
        serde_json::from_value::<Model>(value).expect_err("hostile").to_string()
    };
    let many = error(&|value| value["layers"][0]["count"] = u64::MAX.into());
    assert_eq!(many, format!("layers: {} is not between 1 and {MAX_LAYERS}", u64::MAX));
    let sum = error(&|value| {
        value["layers"][0]["count"] = u64::MAX.into();
        let run = value["layers"][0].clone();
        value["layers"].as_array_mut().expect("runs").push(run);
    });
    assert_eq!(sum, many);
    assert_eq!(
        error(&|value| value["layers"][0]["count"] = 0.into()),
        "layers: 0 is not between 1 and 4096"
    );
    assert_eq!(
        error(&|value| value["layers"][0]["layer"]["up"]["rows"] = u64::MAX.into()),
        format!("layer 0 up: {} x 2048, expected 5632 x 2048", u64::MAX)
    );
    assert!(
        error(&|value| value["head"]["quant"] = "q5".into()).starts_with("unknown weight type")
    );
    assert!(error(&|value| value["vocab"] = (-1).into()).contains("invalid value"));
}

proptest! {
    #[test]
    fn every_built_in_model_in_any_type_is_valid_and_survives_json(
        name in prop::sample::select(builtin_names()),
        quant in any_quant(),
        other in any_quant(),
    ) {
        let model = builtin(name, quant).expect("built in");
        prop_assert_eq!(model.validate(), Ok(()));
        // Which type it had before makes no difference.
        let changed = model.with_quant(other);
        prop_assert_eq!(&changed, &builtin(name, other).expect("built in"));
        prop_assert_eq!(changed.validate(), Ok(()));
        prop_assert_eq!(changed.parameters(), model.parameters());
        let text = serde_json::to_string(&model).expect("JSON");
        // Windows in every second layer make as many runs as there are layers.
        let runs = model.layers.chunk_by(|one, next| one == next).count();
        prop_assert!(text.len() < 1500 + 500 * runs, "{} bytes", text.len());
        prop_assert_eq!(serde_json::from_str::<Model>(&text).expect("valid"), model);
    }

    #[test]
    fn models_with_mixed_layers_survive_json(
        quants in prop::collection::vec((0_usize..22, any_quant()), 0..10),
    ) {
        let mut model = tiny();
        for (at, quant) in quants {
            model.layers[at] = model.layers[at].with_quant(quant);
        }
        let text = serde_json::to_string(&model).expect("JSON");
        prop_assert_eq!(serde_json::from_str::<Model>(&text).expect("valid"), model);
    }

    #[test]
    fn sizes_of_unchecked_models_saturate(
        sizes in prop::array::uniform8(prop_oneof![Just(u64::MAX), Just(0), any::<u64>()]),
    ) {
        let mut model = tiny();
        let [rows, cols, other, kv_heads, head_size, hidden, heads, vocab] = sizes;
        for layer in &mut model.layers {
            (layer.q.rows, layer.k.cols, layer.other_bytes) = (rows, cols, other);
        }
        (model.kv_heads, model.head_size, model.hidden) = (kv_heads, head_size, hidden);
        (model.heads, model.vocab, model.head.rows, model.other_bytes) = (heads, vocab, rows, other);
        let _ = (model.parameters(), model.weight_bytes(), model.read_per_token());
        let _ = (model.kv_bytes_per_token(Quant::F64), model.with_quant(Quant::Q6K));
        let _ = model.validate();
    }
}
