// SPDX-License-Identifier: Apache-2.0
//! Every endpoint with the engine's own service behind it.

use serde_json::{Value, json};

use crate::client::Response;
use crate::place::{CONTEXT, Place};
use crate::script::says;

#[test]
fn answers_of_the_engine_are_the_same_at_once_and_piece_by_piece() {
    let place = Place::real();
    let mut body = json!({
        "model": "tiny", "temperature": 0, "max_tokens": 9,
        "messages": [{ "role": "system", "content": "x" }, { "role": "user", "content": [{ "type": "text", "text": "Hi" }] }],
    });
    let whole = place.post("/v1/chat/completions", &body).ok();
    assert_eq!(whole["object"], "chat.completion");
    let choice = &whole["choices"][0];
    assert_eq!((&choice["index"], &choice["message"]["role"]), (&json!(0), &json!("assistant")));
    assert_eq!(whole["usage"]["completion_tokens"], 9, "{whole}");
    let text = choice["message"]["content"].as_str().expect("text");
    body["stream"] = true.into();
    let chunks = place.post("/v1/chat/completions", &body).chunks();
    let said: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(said, text);
    assert_eq!(
        chunks.last().expect("chunks")["choices"][0]["finish_reason"],
        choice["finish_reason"]
    );
    // The same through the other form of the API, as text and as tokens.
    let prompt = place.post("/apply-template", &body).ok()["prompt"].clone();
    let tokens = place.post("/tokenize", &json!({ "content": prompt })).ok()["tokens"].clone();
    for prompt in [prompt, tokens] {
        let body = json!({ "prompt": prompt, "temperature": 0, "max_tokens": 9 });
        let answer = place.post("/v1/completions", &body).ok();
        assert_eq!(answer["object"], "text_completion");
        assert_eq!(answer["choices"][0]["text"], text);
        for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(answer["usage"][count], whole["usage"][count], "{count}");
        }
        // All but the last token was computed for the first answer.
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 31);
        assert!(answer["timings"]["predicted_ms"].as_f64().is_some_and(|time| time > 0.0));
    }
    place.until_idle();
    let status = place.get("/status").ok();
    assert_eq!((&status["state"], &status["answered"]), (&json!("ready"), &json!(4)), "{status}");
}

#[test]
fn seeds_give_the_same_answers_and_answers_of_a_request_differ() {
    let place = Place::real();
    let body = json!({ "prompt": "abc", "seed": 5, "n": 3, "max_tokens": 12, "temperature": 2 });
    let texts = |answer: &Value| -> Vec<String> {
        let choices = answer["choices"].as_array().expect("choices").iter();
        choices.map(|choice| choice["text"].as_str().expect("text").to_owned()).collect()
    };
    let (one, other) =
        (place.post("/v1/completions", &body).ok(), place.post("/v1/completions", &body).ok());
    assert_eq!(texts(&one), texts(&other));
    assert!(texts(&one)[0] != texts(&one)[1] || texts(&one)[1] != texts(&one)[2]);
    assert_eq!(one["usage"]["prompt_tokens"], 3, "{one}");
    // The second answer is that of the next seed.
    let alone = json!({ "prompt": "abc", "seed": 6, "max_tokens": 12, "temperature": 2 });
    assert_eq!(texts(&place.post("/v1/completions", &alone).ok())[0], texts(&one)[1]);
}

#[test]
fn what_the_server_says_of_itself_is_there() {
    let place = Place::scripted(says("hello"));
    assert_eq!(place.get("/health").ok(), json!({ "status": "ok" }));
    let models = place.get("/v1/models").ok();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(models["data"][0]["meta"]["n_ctx"], CONTEXT);
    assert_eq!(place.get("/v1/models/tiny.gguf").ok()["id"], "tiny");
    let error = place.get("/v1/models/other");
    assert_eq!((error.status, &error.json()["error"]["code"]), (404, &json!("model_not_found")));
    let props = place.get("/props").ok();
    assert_eq!(props["default_generation_settings"]["n_ctx"], CONTEXT);
    assert_eq!((&props["total_slots"], &props["model_path"]), (&json!(2), &json!("tiny.gguf")));
    assert!(props["chat_template"].as_str().is_some_and(|text| text.contains("im_start")));
    let slots = place.get("/slots").ok();
    assert_eq!(slots.as_array().map(Vec::len), Some(2));
    assert_eq!(slots[1]["is_processing"], false);
    let document = place.get("/openapi.json").ok();
    assert_eq!(document["openapi"], "3.1.0");
}

#[test]
fn metrics_count_what_happened() {
    let place = Place::scripted(says("hello"));
    place.post("/v1/completions", &json!({ "prompt": "x" })).ok();
    place.post("/v1/completions", &json!({ "prompt": "x", "max_tokens": 2 })).ok();
    assert_eq!(place.post("/v1/completions", &json!({ "prompt": 5 })).status, 400);
    place.until_idle();
    let response = place.get("/metrics");
    assert_eq!(response.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    for line in [
        "spanker_requests_total{outcome=\"stop\"} 1",
        "spanker_requests_total{outcome=\"length\"} 1",
        "spanker_requests_total{outcome=\"invalid\"} 1",
        "spanker_requests_total{outcome=\"refused\"} 0",
        "spanker_time_to_first_token_seconds_count 2",
        "spanker_time_between_tokens_seconds_count 5",
        "spanker_request_seconds_count 2",
        "spanker_requests_running 0",
        "spanker_kv_blocks 64",
    ] {
        assert!(response.text().lines().any(|one| one == line), "{line}: {}", response.text());
    }
}

#[test]
fn text_becomes_tokens_and_tokens_become_text() {
    let place = Place::scripted(says("hello"));
    let tokenize = |body: Value| place.post("/tokenize", &body).ok()["tokens"].clone();
    assert_eq!(tokenize(json!({ "content": "ab" })), json!([97, 98]));
    let pieces = tokenize(json!({ "content": "a\u{e9}", "with_pieces": true }));
    assert_eq!(pieces[0], json!({ "id": 97, "piece": "a" }));
    assert_eq!(pieces[1]["piece"], json!([0xc3]), "half of a character is no text");
    let marks = |parse: bool| tokenize(json!({ "content": "<|im_end|>", "parse_special": parse }));
    assert_eq!(marks(true), json!([299]));
    assert_eq!(marks(false).as_array().map(Vec::len), Some(10));
    let text = place.post("/detokenize", &json!({ "tokens": [97, 98, 299] })).ok();
    assert_eq!(text, json!({ "content": "ab" }));
    assert_eq!(place.post("/detokenize", &json!({ "tokens": [] })).ok(), json!({ "content": "" }));
}

#[test]
fn several_prompts_have_their_own_answers_and_echo_repeats_them() {
    let place = Place::scripted(says("!"));
    let body = json!({ "prompt": ["a", "bc"], "n": 2, "echo": true });
    let answer = place.post("/v1/completions", &body).ok();
    let choices = answer["choices"].as_array().expect("choices");
    let texts: Vec<_> = choices.iter().map(|choice| (&choice["index"], &choice["text"])).collect();
    let expected = [json!("a!"), json!("a!"), json!("bc!"), json!("bc!")];
    let numbers = [json!(0), json!(1), json!(2), json!(3)];
    assert_eq!(texts, numbers.iter().zip(&expected).collect::<Vec<_>>());
    // Each prompt is counted once, each answer by itself.
    assert_eq!(answer["usage"]["prompt_tokens"], 3);
    assert_eq!(answer["usage"]["completion_tokens"], 4);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 6);
    let body = json!({ "prompt": [[97, 98], [99]], "echo": true, "stream": true });
    let chunks = place.post("/v1/completions", &body).chunks();
    for (index, text) in [(0, "ab!"), (1, "c!")] {
        let own = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == index);
        let said: String = own.filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(said, text);
    }
}

#[test]
fn chances_come_in_both_forms() {
    let place = Place::scripted(says("ab"));
    let message = json!([{ "role": "user", "content": "x" }]);
    let body = json!({ "messages": message, "logprobs": true, "top_logprobs": 2 });
    let choice = place.post("/v1/chat/completions", &body).ok()["choices"][0].clone();
    let first = &choice["logprobs"]["content"][0];
    assert_eq!((&first["token"], &first["logprob"]), (&json!("a"), &json!(-0.5)), "{choice}");
    assert_eq!(
        (&first["bytes"], first["top_logprobs"].as_array().map(Vec::len)),
        (&json!([97]), Some(2))
    );
    assert_eq!(first["top_logprobs"][1]["token"], "b");
    let body = json!({ "messages": message, "logprobs": true });
    let choice = place.post("/v1/chat/completions", &body).ok()["choices"][0].clone();
    assert_eq!(choice["logprobs"]["content"][1]["top_logprobs"], json!([]));
    let body = json!({ "prompt": "x", "logprobs": 2 });
    let logprobs = place.post("/v1/completions", &body).ok()["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs["tokens"], json!(["a", "b"]));
    assert_eq!(
        (&logprobs["token_logprobs"], &logprobs["text_offset"]),
        (&json!([-0.5, -0.5]), &json!([0, 1]))
    );
    assert_eq!(logprobs["top_logprobs"][0], json!({ "a": -0.5, "b": -1.5 }));
    // In a stream every token comes once.
    let body = json!({ "messages": message, "logprobs": true, "stream": true });
    let chunks = place.post("/v1/chat/completions", &body).chunks();
    let tokens: Vec<Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .map(|entry| entry["token"].clone())
        .collect();
    assert_eq!(tokens, [json!("a"), json!("b")]);
}

fn refused(response: &Response, status: u16) -> String {
    let error = response.json()["error"].clone();
    assert_eq!(response.status, status, "{error}");
    let fields = error.as_object().expect("an error").keys().map(String::as_str);
    assert_eq!(fields.collect::<Vec<_>>(), ["message", "type", "param", "code"]);
    error["message"].as_str().expect("a message").to_owned()
}

#[test]
fn paths_methods_and_kinds_that_are_not_there_are_errors_in_the_same_form() {
    let place = Place::scripted(says("hello"));
    assert!(refused(&place.get("/nothing"), 404).contains("/nothing"));
    let wrong = place.get("/v1/chat/completions");
    assert!(refused(&wrong, 405).contains("GET"));
    assert_eq!(wrong.header("allow"), Some("POST"));
    let mut connection = crate::client::connect(place.address);
    for kind in ["multipart/form-data; boundary=x", "text/plain", "image/png"] {
        connection.ask("POST", "/tokenize", &[("content-type", kind)], b"{\"content\": \"x\"}");
        assert!(refused(&connection.response().expect("an answer"), 415).contains("json"));
    }
    for kind in ["application/json; charset=utf-8", "application/x-www-form-urlencoded"] {
        connection.ask("POST", "/tokenize", &[("content-type", kind)], b"{\"content\": \"x\"}");
        connection.response().expect("an answer").ok();
    }
}
