// SPDX-License-Identifier: Apache-2.0
//! Requests drawn at random: whatever a body has in it, the server answers, and the fault is the client's or nobody's.

use std::cell::RefCell;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::client::{Connection, connect};
use crate::place::Place;
use crate::script::says;

const PATHS: [&str; 5] =
    ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/apply-template"];

/// Any value.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-3i64..300).prop_map(Value::from),
        any::<f64>().prop_map(|number| json!(number)),
        "[a-z\"\\\\<|>\u{e9}\u{1f600}\u{0}]{0,6}".prop_map(Value::from),
        prop::sample::select(vec![
            "text",
            "user",
            "assistant",
            "tool",
            "system",
            "function",
            "json_object",
            "json_schema",
            "auto",
            "required",
            "none",
            "object",
            "string",
            "integer",
            "<|im_end|>",
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((key(), inner), 0..6)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// A key that means something somewhere.
fn key() -> impl Strategy<Value = String> {
    let known = prop::sample::select(vec![
        "messages",
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "tools",
        "parameters",
        "tool_choice",
        "prompt",
        "max_tokens",
        "stop",
        "n",
        "stream",
        "logit_bias",
        "response_format",
        "schema",
        "properties",
        "items",
        "enum",
        "pattern",
        "anyOf",
        "required",
        "$ref",
        "tokens",
        "include_usage",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "temperature",
        "5",
    ]);
    prop_oneof![9 => known.prop_map(str::to_owned), 1 => "[a-z]{0,4}"]
}

/// A request with some of its fields as they should be, and some as they come.
fn request() -> impl Strategy<Value = Value> {
    let good = prop::sample::subsequence(
        vec![
            ("messages", json!([{ "role": "user", "content": "x" }])),
            ("prompt", json!("x")),
            ("content", json!("x")),
            ("tokens", json!([1, 2])),
            ("max_tokens", json!(3)),
            ("stream", json!(true)),
            ("n", json!(2)),
            ("logprobs", json!(true)),
            ("tools", json!([{ "type": "function", "function": { "name": "a" } }])),
            ("tool_choice", json!("required")),
            ("response_format", json!({ "type": "json_object" })),
        ],
        0..11,
    );
    let odd = prop::collection::vec((key(), value()), 0..4);
    (good, odd).prop_map(|(good, odd)| {
        let good = good.into_iter().map(|(key, value)| (key.to_owned(), value));
        Value::Object(good.chain(odd).collect::<Map<_, _>>())
    })
}

/// The status of an answer, after which the connection is as good as new.
fn status(connection: &mut Connection, path: &str, body: &[u8]) -> u16 {
    connection.ask("POST", path, &[], body);
    connection.response().expect("an answer").status
}

#[test]
fn no_request_is_the_servers_fault() {
    let place = Place::scripted(says("{\"a\": 1}"));
    let connection = RefCell::new(connect(place.address));
    let strategy = (prop::sample::select(PATHS.to_vec()), prop_oneof![request(), value()]);
    let mut runner = proptest::test_runner::TestRunner::default();
    let fine = RefCell::new(0);
    let ran = runner.run(&strategy, |(path, body)| {
        let status = status(&mut connection.borrow_mut(), path, body.to_string().as_bytes());
        *fine.borrow_mut() += usize::from(status == 200);
        prop_assert!([200, 400, 404].contains(&status), "{}", status);
        Ok(())
    });
    ran.expect("the client's fault");
    assert!(*fine.borrow() > 5, "hardly anything was answered");
    place.until_idle();
}

#[test]
fn no_bytes_are_the_servers_fault() {
    let place = Place::scripted(says("hello"));
    let connection = RefCell::new(connect(place.address));
    let body = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        // JSON with bytes of it changed.
        (request(), any::<prop::sample::Index>(), any::<u8>()).prop_map(|(body, at, byte)| {
            let mut bytes = body.to_string().into_bytes();
            let length = bytes.len();
            bytes[at.index(length)] = byte;
            bytes
        }),
    ];
    let mut runner = proptest::test_runner::TestRunner::default();
    let ran = runner.run(&(prop::sample::select(PATHS.to_vec()), body), |(path, body)| {
        let status = status(&mut connection.borrow_mut(), path, &body);
        prop_assert!([200, 400, 404].contains(&status), "{}", status);
        Ok(())
    });
    ran.expect("the client's fault");
    place.until_idle();
}
