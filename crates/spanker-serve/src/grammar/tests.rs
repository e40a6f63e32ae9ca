// SPDX-License-Identifier: Apache-2.0
//! Answers drawn at random among those that a schema allows, schemas that are refused, and hostile ones.

use ggml_spanker::synthetic::{self, Sizes};
use spanker_model::gguf::{Field, Header, Writer};
use spanker_model::{Quant, builtin};

use super::*;

/// A vocabulary of bytes and marks.
fn tokenizer() -> Tokenizer {
    let like = builtin("tinyllama-1.1b", Quant::Q8_0).expect("a shape");
    let sizes = Sizes { layers: Some(1), vocab: Some(300), ..Sizes::default() };
    let (writer, _) = synthetic::like(&like, "llama", Quant::Q8_0, &sizes).expect("a model");
    let header = writer.header();
    let parsed = Header::read(&header[..], writer.file_bytes()).expect("a header");
    Tokenizer::from_gguf(&parsed, &header).expect("a tokenizer")
}

fn grammars() -> (Tokenizer, Grammars) {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(&tokenizer, 320).expect("grammars");
    (tokenizer, grammars)
}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.0 >> 33) as usize % most
    }
}

fn tokens(mask: &[u32]) -> Vec<u32> {
    let bits = mask.iter().enumerate();
    bits.flat_map(|(word, bits)| {
        (0..32).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word as u32 * 32 + bit)
    })
    .collect()
}

/// An answer that the grammar allows, which ends as soon as it may after so many tokens.
fn draw(tokenizer: &Tokenizer, grammar: &mut dyn Constraint, random: &mut Random) -> String {
    let mut answer = Vec::new();
    while !grammar.is_complete() {
        let mask = grammar.allowed().expect("a mask").expect("not everything");
        assert_eq!(mask.len(), 10);
        let allowed = tokens(&mask);
        assert!(!allowed.is_empty(), "nothing may follow {:?}", tokenizer.decode(&answer));
        let ends = allowed.iter().filter(|&&token| tokenizer.is_end(token)).count();
        // All tokens that end answers, or none; no other mark, and none that does not exist.
        assert!(ends == 0 || ends == tokenizer.ends().len());
        assert!(
            allowed.iter().all(|&token| !tokenizer.is_control(token) || tokenizer.is_end(token))
        );
        assert!(allowed.iter().all(|&token| token < 300));
        if ends > 0 && (answer.len() > 40 || random.below(2) == 0) {
            grammar.accept(tokenizer.ends()[random.below(ends)]).expect("an end");
            assert!(grammar.is_complete());
            break;
        }
        let closes = |token: &&u32| b"\"}]".contains(&tokenizer.piece(**token)[0]);
        let closing = allowed.iter().find(closes).filter(|_| answer.len() > 20);
        let token = *closing.unwrap_or(&allowed[random.below(allowed.len())]);
        grammar.accept(token).expect("allowed");
        answer.push(token);
        assert!(answer.len() < 2000, "{}", tokenizer.decode(&answer));
    }
    tokenizer.decode(&answer)
}

type Holds = fn(&Value) -> bool;

#[test]
fn answers_are_what_their_schema_says() {
    let cases: [(Value, Holds); 8] = [
        (json!({ "type": "object" }), Value::is_object),
        (json!(true), |_| true),
        (json!({ "enum": ["a\u{e9}", 2, null] }), |value| {
            [json!("a\u{e9}"), json!(2), json!(null)].contains(value)
        }),
        (
            json!({
                "type": "object",
                "properties": { "name": { "type": "string" }, "age": { "type": "integer", "minimum": 7, "maximum": 12 } },
                "required": ["name", "age"],
                "additionalProperties": false,
            }),
            |value| {
                let age = value["age"].as_i64().is_some_and(|age| (7..=12).contains(&age));
                age && value["name"].is_string()
                    && value.as_object().is_some_and(|map| map.len() == 2)
            },
        ),
        (
            json!({ "type": "array", "items": { "type": "boolean" }, "minItems": 2, "maxItems": 3 }),
            |value| {
                value.as_array().is_some_and(|list| {
                    [2, 3].contains(&list.len()) && list.iter().all(Value::is_boolean)
                })
            },
        ),
        (json!({ "type": "string", "pattern": "^[a-c]{2,4}$" }), |value| {
            value.as_str().is_some_and(|text| {
                (2..=4).contains(&text.len()) && text.chars().all(|c| "abc".contains(c))
            })
        }),
        (
            json!({ "$ref": "#/$defs/tree", "$defs": { "tree": {
                "type": "object",
                "properties": { "left": { "anyOf": [{ "$ref": "#/$defs/tree" }, { "type": "null" }] } },
                "required": ["left"],
                "additionalProperties": false,
            } } }),
            |value| value.get("left").is_some(),
        ),
        (json!({ "oneOf": [{ "type": "string" }, { "type": "integer" }] }), |value| {
            value.is_string() || value.is_i64() || value.is_u64() || value.is_f64()
        }),
    ];
    let (tokenizer, grammars) = grammars();
    for (schema, holds) in cases {
        let mut grammar = grammars.build(&schema).expect("a grammar");
        for seed in 0..20 {
            let answer = draw(&tokenizer, &mut grammar, &mut Random(seed));
            let value: Value =
                serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{answer}: {error}"));
            assert!(holds(&value), "{schema}: {answer}");
            // The same again, from the beginning.
            let mut again = grammar.restarted();
            assert_eq!(draw(&tokenizer, &mut *again, &mut Random(seed)), answer);
            grammar = grammar.restart();
        }
    }
}

#[test]
fn tokens_that_may_not_follow_are_refused() {
    let (tokenizer, grammars) = grammars();
    let mut grammar = grammars.build(&json!({ "type": "object" })).expect("a grammar");
    let token = |text: &str| tokenizer.encode(text, false, false)[0];
    grammar.accept(token("{")).expect("an object");
    assert!(grammar.accept(token("]")).is_err());
    // What went wrong stays wrong, and a restart is as new.
    assert!(grammar.allowed().is_err());
    assert!(grammar.restarted().accept(token("{")).is_ok());
}

#[test]
fn vocabulary_without_a_token_that_ends_answers_has_grammars_that_end() {
    let mut writer = Writer::new();
    for (key, field) in [
        ("model", Field::Text("gpt2")),
        ("pre", Field::Text("gpt-2")),
        ("tokens", Field::Texts(&["\"", "a", "b", ""])),
        ("token_type", Field::I32s(&[1, 1, 1, 1])),
        ("merges", Field::Texts(&[])),
    ] {
        writer.put(&format!("tokenizer.ggml.{key}"), field).expect("a key");
    }
    let header = writer.header();
    let parsed = Header::read(&header[..], writer.file_bytes()).expect("a header");
    let tokenizer = Tokenizer::from_gguf(&parsed, &header).expect("a tokenizer");
    assert!(tokenizer.ends().is_empty());
    let grammars = Grammars::new(&tokenizer, 4).expect("grammars");
    let mut grammar = grammars.build(&json!({ "const": "ab" })).expect("a grammar");
    for token in [0, 1, 2, 0] {
        let mask = grammar.allowed().expect("a mask").expect("not everything");
        assert_eq!(mask, [1 << token]);
        grammar.accept(token).expect("the text");
    }
    assert!(grammar.is_complete());
}

#[test]
fn schemas_that_cannot_be_kept_say_what_cannot() {
    let (_, grammars) = grammars();
    let deep = (0..100)
        .fold(json!({ "type": "string" }), |inner, _| json!({ "items": inner, "type": "array" }));
    assert!(grammars.build(&deep).is_ok(), "a deep one");
    for (schema, said) in [
        (json!(false), "nothing"),
        (json!({ "type": "strin" }), "strin"),
        (json!({ "type": "string", "format": "no-such" }), "no-such"),
        (json!({ "not": { "type": "string" } }), "not"),
        (json!({ "minimum": 5, "maximum": 3, "type": "integer" }), "minimum"),
        (json!({ "type": "string", "pattern": "(" }), ""),
        (json!({ "type": "string", "pattern": "(a)\\1" }), ""),
        (json!({ "$ref": "#/$defs/none" }), "none"),
        (json!({ "$ref": "https://example.org/x" }), "example.org"),
        (json!({ "allOf": [{ "type": "string" }, { "type": "null" }] }), "nsatisfiable"),
        (
            json!({ "oneOf": [{ "minimum": 1, "type": "number" }, { "minimum": 2, "type": "number" }] }),
            "oneOf",
        ),
        (json!({ "enum": ["\u{e9}".repeat(200_000)] }), "bytes"),
        // The parser cuts values for its errors, in the midst of characters if they lie so.
        (json!({ "type": "string", "pattern": { "x": "\u{e9}".repeat(80) } }), ""),
        (
            json!({ "type": "string", "x": 1, "pattern": { "x": format!("a{}", "\u{e9}".repeat(80)) } }),
            "",
        ),
    ] {
        let error = grammars.build(&schema).err().unwrap_or_else(|| panic!("{schema} is taken"));
        assert!(
            error.contains(said) && !error.is_empty() && error.len() < 1000,
            "{schema}: {error}"
        );
        assert!(!error.contains("backtrace"), "{error}");
    }
}

/// Schemas that would take all time or memory without bounds.
fn hostile() -> Vec<Value> {
    let options = |count: usize, width: usize| -> Value {
        (0..count)
            .map(|at| json!({ "anyOf": (0..width).map(|way| json!({ "properties": { format!("p{at}_{way}"): { "type": "string" } }, "type": "object" })).collect::<Vec<_>>() }))
            .collect()
    };
    let chain: serde_json::Map<String, Value> = (0..40)
        .map(|at| {
            let next = json!({ "$ref": format!("#/$defs/d{}", at + 1) });
            (format!("d{at}"), json!({ "anyOf": [{ "type": "array", "items": [next, next] }, { "allOf": [next, next] }] }))
        })
        .chain([("d40".to_owned(), json!({ "type": "string" }))])
        .collect();
    let strings = |count: usize, end: &str| -> Vec<Value> {
        (0..count)
            .map(|at| json!({ "type": "string", "pattern": format!("^.*x{at}.*y.*{end}$") }))
            .collect()
    };
    let keys = |count: usize, value: Value| -> serde_json::Map<String, Value> {
        (0..count).map(|at| (format!("p{at}"), value.clone())).collect()
    };
    let patterns: serde_json::Map<_, _> =
        (0..60).map(|at| (format!("^.*a{at}.*b.*$"), json!({}))).collect();
    vec![
        json!({ "allOf": options(12, 4) }),
        json!({ "$ref": "#/$defs/d0", "$defs": chain }),
        json!({ "type": "string", "minLength": 100_000_000, "maxLength": 100_000_001 }),
        json!({ "type": "string", "pattern": "(a{1000}){1000}" }),
        json!({ "type": "string", "pattern": "(.*a.{20}){10}" }),
        json!({ "type": "string", "pattern": "a|x.*y.{50}z", "maxLength": 3000 }),
        json!({ "allOf": [{ "type": "string", "pattern": "^a|x.*a.{300}$" }, { "type": "string", "pattern": "^a|x.*b.{300}$" }] }),
        json!({ "type": "array", "minItems": 1_000_000_000, "items": {} }),
        json!({ "type": "array", "maxItems": 100_000, "items": { "type": "string" } }),
        json!({ "type": "integer", "multipleOf": 123_456_789 }),
        json!({ "type": "integer", "multipleOf": 99_991, "minimum": 1 }),
        json!({ "type": "number", "minimum": 0.123_456_789_1, "maximum": 98_765_432.123_456 }),
        json!({ "enum": (0..20_000).map(|at| format!("value{at}")).collect::<Vec<_>>() }),
        json!({ "enum": (0..19_000).map(|at| format!("value{at}")).collect::<Vec<_>>() }),
        json!({ "type": "object", "properties": keys(3000, json!({})) }),
        json!({ "type": "object", "properties": keys(2000, json!({})), "minProperties": 1000 }),
        json!({ "type": "object", "properties": keys(30, json!({})), "minProperties": 15, "maxProperties": 16 }),
        json!({ "type": "object", "patternProperties": patterns }),
        json!({ "type": "object", "patternProperties": keys(16, json!({})) }),
        json!({ "anyOf": strings(200, "z") }),
        json!({ "allOf": strings(30, "z") }),
        json!({ "allOf": strings(4, "(a|b|c|d)z") }),
        json!({ "oneOf": keys(1900, json!({ "type": "object" })).into_iter().map(|(key, value)| json!({ "type": "object", "properties": { key: value } })).collect::<Vec<_>>() }),
        json!({ "anyOf": (0..1900).map(|at| json!({ "type": "object", "required": [format!("k{at}")], "properties": { format!("k{at}"): { "const": at } } })).collect::<Vec<_>>() }),
    ]
}

/// What comes of a schema: why it is refused, or a few steps of an answer.
fn survived(tokenizer: &Tokenizer, grammars: &Grammars, schema: &Value) -> Result<(), String> {
    let mut grammar = grammars.build(schema)?;
    let mut random = Random(1);
    for _ in 0..30 {
        let allowed = tokens(&grammar.allowed()?.expect("not everything"));
        let token = allowed[random.below(allowed.len())];
        grammar.accept(token)?;
        if tokenizer.is_end(token) {
            break;
        }
    }
    Ok(())
}

#[test]
fn hostile_schemas_end_in_a_bound() {
    let (tokenizer, grammars) = grammars();
    // Without bounds, these take gigabytes and hours; what waits is the test's own patience.
    let outcomes: Vec<_> =
        hostile().iter().map(|schema| survived(&tokenizer, &grammars, schema)).collect();
    let refused = outcomes.iter().filter(|outcome| outcome.is_err()).count();
    assert!(refused >= 12, "{outcomes:?}");
    assert!(
        outcomes.iter().flat_map(|outcome| outcome.as_ref().err()).all(|said| !said.is_empty())
    );
}
