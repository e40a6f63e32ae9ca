// SPDX-License-Identifier: Apache-2.0
//! Fields that make no sense, each with the name that the error gives.

use serde_json::{Value, json};

use crate::client::post_bytes;
use crate::place::{CONTEXT, Place};
use crate::script::says;

/// A body of an endpoint that is as it should be.
fn good(path: &str) -> Value {
    match path {
        "/v1/chat/completions" | "/apply-template" => {
            json!({ "messages": [{ "role": "user", "content": "x" }] })
        }
        "/v1/completions" => json!({ "prompt": "x" }),
        "/tokenize" => json!({ "content": "x" }),
        _ => json!({ "tokens": [1] }),
    }
}

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// A field, a value that makes no sense, and the `param` of the error if it is another.
type Wrong = (&'static str, Value, &'static str);

/// What is wrong in both forms: a field, its value, and the `param` if it is another.
fn wrong_everywhere() -> Vec<Wrong> {
    let long = "x".repeat(513);
    let many: Vec<&str> = vec!["x"; 17];
    vec![
        ("model", json!(5), ""),
        ("max_tokens", json!(0), ""),
        ("max_tokens", json!(-1), ""),
        ("max_tokens", json!(1.5), ""),
        ("max_tokens", json!("5"), ""),
        ("max_tokens", json!(1e300), ""),
        ("max_completion_tokens", json!(0), ""),
        ("max_completion_tokens", json!([1]), ""),
        ("temperature", json!(-0.1), ""),
        ("temperature", json!(101), ""),
        ("temperature", json!("hot"), ""),
        ("top_p", json!(1.1), ""),
        ("top_p", json!(-0.1), ""),
        ("top_p", json!(true), ""),
        ("top_k", json!(-2), ""),
        ("top_k", json!(0.5), ""),
        ("min_p", json!(2), ""),
        ("min_p", json!({}), ""),
        ("seed", json!("x"), ""),
        ("seed", json!(0.5), ""),
        ("stop", json!(""), ""),
        ("stop", json!(5), ""),
        ("stop", json!(["x", ""]), "stop[1]"),
        ("stop", json!(["x", 5]), "stop[1]"),
        ("stop", json!(long), ""),
        ("stop", json!(many), ""),
        ("n", json!(0), ""),
        ("n", json!(1.5), ""),
        ("n", json!(100), ""),
        ("n", json!(129), ""),
        ("stream", json!("yes"), ""),
        ("stream", json!(1), ""),
        ("stream_options", json!(true), ""),
        ("stream_options", json!({ "include_usage": 1 }), "stream_options.include_usage"),
    ]
}

/// More of it.
fn wrong_everywhere_as_well() -> Vec<Wrong> {
    let biases = (0..1025).map(|at| (at.to_string(), json!(0)));
    let biases = Value::Object(biases.collect());
    vec![
        ("logit_bias", json!([]), ""),
        ("logit_bias", json!({ "a": 1 }), ""),
        ("logit_bias", json!({ "300": 1 }), ""),
        ("logit_bias", json!({ "-1": 1 }), ""),
        ("logit_bias", json!({ "5": 101 }), "logit_bias.5"),
        ("logit_bias", json!({ "5": "x" }), "logit_bias.5"),
        ("logit_bias", biases, ""),
        ("presence_penalty", json!(2.1), ""),
        ("presence_penalty", json!("x"), ""),
        ("frequency_penalty", json!(-2.1), ""),
        ("repeat_penalty", json!(0), ""),
        ("repeat_penalty", json!(-1), ""),
        ("response_format", json!("json"), ""),
        ("response_format", json!({}), "response_format.type"),
        ("response_format", json!({ "type": "xml" }), "response_format.type"),
        ("response_format", json!({ "type": "json_schema" }), "response_format.json_schema"),
        (
            "response_format",
            json!({ "type": "json_schema", "json_schema": 5 }),
            "response_format.json_schema",
        ),
        (
            "response_format",
            json!({ "type": "json_schema", "json_schema": { "name": "x" } }),
            "response_format.json_schema.schema",
        ),
        (
            "response_format",
            json!({ "type": "json_schema", "json_schema": { "schema": "x" } }),
            "response_format.json_schema.schema",
        ),
        (
            "response_format",
            json!({ "type": "json_schema", "json_schema": { "schema": { "type": "strin" } } }),
            "",
        ),
        ("response_format", json!({ "type": "json_object", "schema": { "not": {} } }), ""),
        (
            "response_format",
            json!({ "type": "json_object", "schema": [] }),
            "response_format.schema",
        ),
        ("ignore_eos", json!("x"), ""),
        ("cache_prompt", json!(0), ""),
        ("timings_per_token", json!([]), ""),
        ("grammar", json!("root ::= x"), ""),
        ("json_schema", json!({ "type": "object" }), ""),
    ]
}

/// What is wrong in chats.
fn wrong_in_chats() -> Vec<Wrong> {
    let user = |content: Value| json!([{ "role": "user", "content": content }]);
    let call = |function: Value| json!([{ "role": "assistant", "tool_calls": [{ "function": function }] }]);
    vec![
        ("messages", Value::Null, ""),
        ("messages", json!([]), ""),
        ("messages", json!("x"), ""),
        ("messages", json!(["x"]), "messages[0]"),
        ("messages", json!([{}]), "messages[0].role"),
        ("messages", json!([{ "role": "user" }]), "messages[0].content"),
        ("messages", json!([{ "role": "assistant" }]), "messages[0].content"),
        ("messages", json!([{ "role": "judge", "content": "x" }]), "messages[0].role"),
        ("messages", json!([{ "role": 5, "content": "x" }]), "messages[0].role"),
        ("messages", user(json!(5)), "messages[0].content"),
        ("messages", user(json!([5])), "messages[0].content[0]"),
        ("messages", user(json!([{ "type": "text" }])), "messages[0].content[0].text"),
        ("messages", user(json!([{ "type": "text", "text": 5 }])), "messages[0].content[0].text"),
        (
            "messages",
            user(
                json!([{ "type": "text", "text": "x" }, { "type": "image_url", "image_url": { "url": "data:x" } }]),
            ),
            "messages[0].content[1].type",
        ),
        ("messages", json!([{ "role": "user", "content": "x", "name": 5 }]), "messages[0].name"),
        (
            "messages",
            json!([{ "role": "tool", "content": "x", "tool_call_id": 5 }]),
            "messages[0].tool_call_id",
        ),
        ("messages", json!([{ "role": "assistant", "tool_calls": 5 }]), "messages[0].tool_calls"),
        (
            "messages",
            json!([{ "role": "assistant", "tool_calls": [5] }]),
            "messages[0].tool_calls[0]",
        ),
        (
            "messages",
            json!([{ "role": "assistant", "tool_calls": [{}] }]),
            "messages[0].tool_calls[0].function",
        ),
        ("messages", call(json!({})), "messages[0].tool_calls[0].function.name"),
        ("messages", call(json!({ "name": "a b" })), "messages[0].tool_calls[0].function.name"),
        (
            "messages",
            call(json!({ "name": "a", "arguments": 5 })),
            "messages[0].tool_calls[0].function.arguments",
        ),
        ("messages", user(json!("x".repeat(CONTEXT))), "messages"),
    ]
}

/// What is wrong with tools, and with what only chats have.
fn wrong_with_tools() -> Vec<Wrong> {
    let tool = |more: Value| json!([{ "type": "function", "function": more }]);
    let names = json!([{ "type": "function", "function": { "name": "a" } }, { "type": "function", "function": { "name": "a" } }]);
    vec![
        ("logprobs", json!(1), ""),
        ("top_logprobs", json!(2), ""),
        ("top_logprobs", json!(21), ""),
        ("top_logprobs", json!(-1), ""),
        ("tools", json!("x"), ""),
        ("tools", json!([5]), "tools[0]"),
        ("tools", json!([{}]), "tools[0].type"),
        ("tools", json!([{ "type": "code" }]), "tools[0].type"),
        ("tools", json!([{ "type": "function" }]), "tools[0].function"),
        ("tools", tool(json!({})), "tools[0].function.name"),
        ("tools", tool(json!({ "name": "a b" })), "tools[0].function.name"),
        ("tools", tool(json!({ "name": "x".repeat(65) })), "tools[0].function.name"),
        ("tools", tool(json!({ "name": "a", "description": 5 })), "tools[0].function.description"),
        ("tools", tool(json!({ "name": "a", "parameters": 5 })), "tools[0].function.parameters"),
        ("tools", json!(vec![json!({}); 129]), ""),
        ("tools", names, "tools[1].function.name"),
        ("tool_choice", json!("sometimes"), ""),
        ("tool_choice", json!(5), ""),
        ("tool_choice", json!("required"), ""),
        ("tool_choice", json!({}), "tool_choice.type"),
        ("tool_choice", json!({ "type": "function" }), "tool_choice.function"),
        (
            "tool_choice",
            json!({ "type": "function", "function": { "name": "a" } }),
            "tool_choice.function.name",
        ),
        ("parallel_tool_calls", json!("x"), ""),
        ("audio", json!({ "voice": "x" }), ""),
        ("modalities", json!(["audio"]), ""),
        ("functions", json!([{ "name": "x" }]), ""),
        ("web_search_options", json!({ "x": 1 }), ""),
    ]
}

/// What is wrong in completions.
fn wrong_in_completions() -> Vec<Wrong> {
    vec![
        ("prompt", Value::Null, ""),
        ("prompt", json!(5), ""),
        ("prompt", json!([]), ""),
        ("prompt", json!({}), ""),
        ("prompt", json!(""), ""),
        ("prompt", json!([300]), "prompt[0]"),
        ("prompt", json!([1, "x"]), "prompt[1]"),
        ("prompt", json!([1, -1]), "prompt[1]"),
        ("prompt", json!([1.5]), "prompt[0]"),
        ("prompt", json!(["x", 5]), "prompt[1]"),
        ("prompt", json!(["x", []]), "prompt[1]"),
        ("prompt", json!([[1], [300]]), "prompt[1][0]"),
        ("prompt", json!(vec!["x"; 9]), ""),
        ("prompt", json!("x".repeat(CONTEXT)), ""),
        ("prompt", json!(vec![1; CONTEXT]), ""),
        ("logprobs", json!(true), ""),
        ("logprobs", json!(21), ""),
        ("echo", json!("x"), ""),
        ("suffix", json!("x"), ""),
        ("best_of", json!(2), ""),
    ]
}

#[test]
fn every_field_that_makes_no_sense_is_named() {
    let place = Place::scripted(says("hello"));
    let mut count = 0;
    let mut check = |path: &str, (field, value, param): (&str, Value, &str)| {
        let mut body = good(path);
        body[field] = value;
        let response = place.post(path, &body);
        let error = response.json()["error"].clone();
        let param = if param.is_empty() { field } else { param };
        assert_eq!(
            (response.status, &error["param"]),
            (400, &json!(param)),
            "{path} {body:.200}: {error}"
        );
        let message = error["message"].as_str().expect("a message");
        assert!(
            message.starts_with(param) && (!message.ends_with('.') || message.ends_with("..")),
            "{message}"
        );
        assert_eq!(error["type"], "invalid_request_error");
        count += 1;
    };
    for path in [CHAT, TEXT] {
        let both = wrong_everywhere().into_iter().chain(wrong_everywhere_as_well());
        both.for_each(|case| check(path, case));
    }
    let chats = wrong_in_chats().into_iter().chain(wrong_with_tools());
    chats.for_each(|case| check(CHAT, case));
    wrong_in_completions().into_iter().for_each(|case| check(TEXT, case));
    for case in [
        ("content", json!(5), ""),
        ("content", Value::Null, ""),
        ("add_special", json!(1), ""),
        ("parse_special", json!("x"), ""),
        ("with_pieces", json!([]), ""),
    ] {
        check("/tokenize", case);
    }
    for case in [
        ("tokens", json!("x"), ""),
        ("tokens", Value::Null, ""),
        ("tokens", json!([300]), "tokens[0]"),
    ] {
        check("/detokenize", case);
    }
    for case in [("messages", json!([]), ""), ("tools", json!(5), "")] {
        check("/apply-template", case);
    }
    assert!(count > 190, "{count}");
    place.until_idle();
}

#[test]
fn every_field_of_the_document_is_read() {
    let place = Place::scripted(says("hello"));
    let document = place.get("/openapi.json").ok();
    let mut count = 0;
    for (path, operation) in document["paths"].as_object().expect("paths") {
        let schema = &operation["post"]["requestBody"]["content"]["application/json"]["schema"];
        for field in schema["properties"].as_object().into_iter().flatten() {
            // No field is a list of lists of nothing.
            let mut body = good(path);
            body[field.0] = json!([[[]]]);
            let response = place.post(path, &body);
            let param = response.json()["error"]["param"].clone();
            assert_eq!(response.status, 400, "{path} {}", field.0);
            assert!(
                param.as_str().is_some_and(|param| param.starts_with(field.0.as_str())),
                "{path} {}: {param}",
                field.0
            );
            count += 1;
        }
    }
    assert!(count > 50, "{count}");
}

#[test]
fn values_that_ask_for_nothing_and_fields_that_nobody_knows_are_no_errors() {
    let place = Place::scripted(says("hello"));
    for (path, more) in [
        (
            CHAT,
            json!({ "user": "x", "store": false, "metadata": {}, "service_tier": "auto", "xyz": [1] }),
        ),
        (
            CHAT,
            json!({ "modalities": ["text"], "audio": null, "functions": [], "tools": [], "tool_choice": "auto" }),
        ),
        (
            CHAT,
            json!({ "tools": null, "tool_choice": null, "response_format": { "type": "text" }, "stop": null, "stop": [] }),
        ),
        (
            CHAT,
            json!({ "temperature": 0, "top_p": 0, "top_k": 0, "min_p": 0, "n": 1, "max_tokens": 2_000_000 }),
        ),
        (
            TEXT,
            json!({ "suffix": null, "best_of": 1, "echo": null, "logprobs": null, "grammar": "", "user": 5 }),
        ),
        (TEXT, json!({ "suffix": "", "stream_options": null, "stream_options": {} })),
    ] {
        let mut body = good(path);
        body.as_object_mut()
            .expect("an object")
            .extend(more.as_object().expect("an object").clone());
        place.post(path, &body).ok();
    }
    for model in ["tiny", "tiny.gguf"] {
        place.post(TEXT, &json!({ "prompt": "x", "model": model })).ok();
    }
    let response = place.post(TEXT, &json!({ "prompt": "x", "model": "gpt-4" }));
    let error = &response.json()["error"];
    assert_eq!(
        (response.status, &error["param"], &error["code"]),
        (404, &json!("model"), &json!("model_not_found"))
    );
}

#[test]
fn bodies_that_are_no_json_say_where_they_go_wrong() {
    let place = Place::scripted(says("hello"));
    let deep = format!("{{\"prompt\": {}{}}}", "[".repeat(200), "]".repeat(200));
    let long = format!("{{\"prompt\": [{}]}}", "1,".repeat(100));
    for (body, said) in [
        (&b""[..], "the body is not JSON"),
        (b"{", "line 1"),
        (b"[1]", "expected an object"),
        (b"null", "expected an object"),
        (b"{\"prompt\": \"\xff\xfe\"}", "not JSON"),
        (b"{\"prompt\": \"\\ud800\"}", "not JSON"),
        (b"{\"prompt\": \"x\"} x", "not JSON"),
        (b"{\"temperature\": 1e999, \"prompt\": \"x\"}", "not JSON"),
        (b"{\"temperature\": NaN, \"prompt\": \"x\"}", "not JSON"),
        (deep.as_bytes(), "recursion"),
        (long.as_bytes(), "not JSON"),
    ] {
        for path in [CHAT, TEXT, "/tokenize", "/detokenize", "/apply-template"] {
            let response = post_bytes(place.address, path, body);
            let error = response.json()["error"].clone();
            assert_eq!(response.status, 400, "{path} {error}");
            assert!(
                error["message"].as_str().is_some_and(|message| message.contains(said)),
                "{said}: {error}"
            );
        }
    }
}

#[test]
fn values_in_errors_are_short_and_harmless() {
    let place = Place::scripted(says("hello"));
    let body =
        json!({ "prompt": "x", "temperature": format!("\u{1b}[2J\n{}", "x".repeat(10_000)) });
    let response = place.post(TEXT, &body);
    let message = response.json()["error"]["message"].as_str().expect("a message").to_owned();
    assert!(
        message.len() < 200 && !message.contains('\u{1b}') && !message.contains('\n'),
        "{message}"
    );
}
