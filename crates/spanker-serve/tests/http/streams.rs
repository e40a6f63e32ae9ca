// SPDX-License-Identifier: Apache-2.0
//! Streams, byte by byte: framing, what comes first and last, and what happens when an answer goes wrong on its way.

use serde_json::{Value, json};
use spanker_engine::{Ask, FinishReason, Model, Update};

use crate::client::connect;
use crate::place::Place;
use crate::script::{corrected, done, piece, says};

const CHAT: &str = "/v1/chat/completions";

fn chat(more: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "x" }], "stream": true });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

/// What is the same in every chunk, cut out.
fn plain(text: &str) -> String {
    let value = |name: &str| {
        let from = text.find(&format!("\"{name}\":")).expect(name) + name.len() + 3;
        let end = from + text[from..].find([',', '}']).expect("an end");
        text[from..end].to_owned()
    };
    text.replace(&value("id"), "\"ID\"").replace(&value("created"), "0").replace(
        &format!("\"system_fingerprint\":{}", value("system_fingerprint")),
        "\"system_fingerprint\":\"F\"",
    )
}

#[test]
fn stream_of_a_chat_is_framed_as_clients_expect_byte_for_byte() {
    let place = Place::scripted(says("h\u{e9}"));
    let response = place.post(CHAT, &chat(json!({ "stream_options": { "include_usage": true } })));
    assert_eq!(response.header("content-type"), Some("text/event-stream"));
    assert_eq!(response.header("cache-control"), Some("no-cache"));
    let text = plain(response.text());
    let timings = text.find(",\"timings\":").expect("timings");
    let end = timings + text[timings..].find("}}").expect("an end") + 1;
    let text = format!("{}{}", &text[..timings], &text[end..]);
    let head = "\"id\":\"ID\",\"object\":\"chat.completion.chunk\",\"created\":0,\"model\":\"tiny\",\
                \"system_fingerprint\":\"F\"";
    let chunk = |delta: &str, finish: &str| {
        format!(
            "data: {{{head},\"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\
             \"finish_reason\":{finish}}}],\"usage\":null}}\n\n"
        )
    };
    let expected = [
        chunk("{\"role\":\"assistant\",\"content\":\"\"}", "null"),
        chunk("{\"content\":\"h\"}", "null"),
        chunk("{\"content\":\"\u{e9}\"}", "null"),
        chunk("{}", "\"stop\""),
        format!(
            "data: {{{head},\"choices\":[],\"usage\":{{\"prompt_tokens\":9,\"completion_tokens\":3,\
             \"total_tokens\":12,\"prompt_tokens_details\":{{\"cached_tokens\":3}}}}}}\n\n"
        ),
        "data: [DONE]\n\n".to_owned(),
    ];
    // The template's text is not what this is about.
    let tokens = response.text().split("\"prompt_tokens\":").nth(1).expect("usage");
    let tokens: usize = tokens.split(',').next().expect("a number").parse().expect("a number");
    let expected =
        expected.concat().replace("\"prompt_tokens\":9", &format!("\"prompt_tokens\":{tokens}"));
    assert_eq!(
        text,
        expected.replace("\"total_tokens\":12", &format!("\"total_tokens\":{}", tokens + 3))
    );
}

#[test]
fn stream_of_a_completion_has_text_and_no_usage_unless_asked_for() {
    let place = Place::scripted(says("ab"));
    let chunks = place.post("/v1/completions", &json!({ "prompt": "x", "stream": true })).chunks();
    let told: Vec<(&Value, &Value)> = chunks
        .iter()
        .map(|chunk| (&chunk["choices"][0]["text"], &chunk["choices"][0]["finish_reason"]))
        .collect();
    let null = Value::Null;
    let stop = json!("stop");
    assert_eq!(told, [(&json!("a"), &null), (&json!("b"), &null), (&json!(""), &stop)]);
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk.get("usage").is_none() && chunk["object"] == "text_completion")
    );
}

#[test]
fn first_event_comes_before_the_last_token_is_made() {
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    let receiver = std::sync::Mutex::new(receiver);
    let place = Place::scripted(move |_: &Model, _: Ask, tell: &mut dyn FnMut(Update) -> bool| {
        tell(Update::Begun { cached_tokens: 0 });
        tell(piece(97, "a"));
        receiver.lock().expect("no panic").recv().expect("a sign");
        tell(done(1, 1, FinishReason::Length));
    });
    let mut connection = connect(place.address);
    connection.ask("POST", CHAT, &[], chat(json!({})).to_string().as_bytes());
    assert_eq!(connection.head().map(|head| head.status), Some(200));
    let mut seen = String::new();
    while !seen.contains("\"content\":\"a\"") {
        seen += std::str::from_utf8(&connection.chunk().expect("a chunk")).expect("text");
    }
    sender.send(()).expect("a voice");
    while let Some(more) = connection.chunk() {
        seen += std::str::from_utf8(&more).expect("text");
    }
    assert!(seen.ends_with("data: [DONE]\n\n") && seen.contains("\"finish_reason\":\"length\""));
}

#[test]
fn answers_to_one_request_take_turns_in_a_stream() {
    let place = Place::scripted(says("abc"));
    let chunks = place
        .post(CHAT, &chat(json!({ "n": 3, "stream_options": { "include_usage": true } })))
        .chunks();
    for index in 0..3 {
        let own = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == index);
        let own: Vec<&Value> = own.map(|chunk| &chunk["choices"][0]).collect();
        assert_eq!(own[0]["delta"]["role"], "assistant");
        let said: String = own.iter().filter_map(|one| one["delta"]["content"].as_str()).collect();
        assert_eq!(said, "abc");
        assert_eq!(own.last().expect("chunks")["finish_reason"], "stop");
    }
    assert_eq!(chunks.last().expect("chunks")["usage"]["completion_tokens"], 9);
}

#[test]
fn timings_come_with_every_piece_where_they_are_asked_for() {
    let place = Place::scripted(says("ab"));
    let chunks = place.post(CHAT, &chat(json!({ "timings_per_token": true }))).chunks();
    assert!(chunks.iter().all(|chunk| chunk["timings"]["prompt_n"].is_u64()), "{chunks:?}");
    assert_eq!(chunks[2]["timings"]["predicted_n"], 2);
    let last = &chunks.last().expect("chunks")["timings"];
    assert_eq!((&last["predicted_ms"], &last["cache_n"]), (&json!(200.0), &json!(3)));
}

/// Says "abc", then that everything from the second token on was wrong, then "xy".
fn wrong(_: &Model, ask: Ask, tell: &mut dyn FnMut(Update) -> bool) {
    tell(Update::Begun { cached_tokens: 0 });
    for (token, text) in [(97, "a"), (98, "b"), (99, "c")] {
        tell(piece(token, text));
    }
    tell(corrected(120, "x", 1, 1));
    tell(piece(121, "y"));
    tell(done(ask.prompt.len(), 3, FinishReason::End));
}

#[test]
fn correction_of_what_was_sent_ends_a_stream_without_its_end() {
    let place = Place::scripted(wrong);
    for (path, body) in
        [(CHAT, chat(json!({}))), ("/v1/completions", json!({ "prompt": "x", "stream": true }))]
    {
        let events = place.post(path, &body).events();
        let last: Value = serde_json::from_str(events.last().expect("events")).expect("JSON");
        assert_eq!(last["error"]["code"], "corrected", "{last}");
        assert!(
            last["error"]["message"]
                .as_str()
                .is_some_and(|said| said.contains("token 2") && said.contains("card 2"))
        );
        assert!(!events.iter().any(|event| event == "[DONE]"));
    }
}

#[test]
fn correction_in_an_answer_that_comes_at_once_leaves_the_right_text() {
    let place = Place::scripted(wrong);
    let body = chat(json!({ "stream": false, "logprobs": true }));
    let answer = place.post(CHAT, &body).ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "axy");
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().expect("chances");
    assert_eq!(
        tokens.iter().map(|one| one["token"].as_str().expect("text")).collect::<String>(),
        "axy"
    );
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let answer = place.post("/v1/completions", &json!({ "prompt": "x" })).ok();
    assert_eq!(answer["choices"][0]["text"], "axy");
}

#[test]
fn correction_of_what_was_not_sent_yet_changes_nothing_in_a_stream() {
    // A stop string could have begun there: the text was held back.
    let place = Place::scripted(|_: &Model, ask: Ask, tell: &mut dyn FnMut(Update) -> bool| {
        tell(Update::Begun { cached_tokens: 0 });
        tell(piece(97, "a"));
        tell(piece(98, ""));
        tell(corrected(120, "x", 1, 1));
        tell(done(ask.prompt.len(), 2, FinishReason::End));
    });
    let chunks = place.post(CHAT, &chat(json!({}))).chunks();
    let said: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(said, "ax");
    // With chances, the token itself was told of.
    let events = place.post(CHAT, &chat(json!({ "logprobs": true }))).events();
    assert!(events.last().is_some_and(|last| last.contains("corrected")), "{events:?}");
}

#[test]
fn answers_that_fail_say_so_with_a_status_or_at_the_end_of_a_stream() {
    let fails = |is_request: bool, after: usize| {
        move |_: &Model, _: Ask, tell: &mut dyn FnMut(Update) -> bool| {
            if after > 0 {
                tell(Update::Begun { cached_tokens: 0 });
                tell(piece(97, "a"));
            }
            tell(Update::Failed { what: "card 3 is gone".into(), is_request });
        }
    };
    for (is_request, status) in [(true, 400), (false, 503)] {
        let place = Place::scripted(fails(is_request, 0));
        for stream in [false, true] {
            let response = place.post(CHAT, &chat(json!({ "stream": stream })));
            assert_eq!(response.status, status);
            assert_eq!(response.json()["error"]["message"], "card 3 is gone");
        }
    }
    let place = Place::scripted(fails(false, 1));
    assert_eq!(place.post(CHAT, &chat(json!({ "stream": false }))).status, 503);
    let events = place.post(CHAT, &chat(json!({}))).events();
    assert!(events.last().is_some_and(|last| last.contains("card 3 is gone")), "{events:?}");
    // A model's side that goes away without a word.
    let place = Place::scripted(|_: &Model, _: Ask, _: &mut dyn FnMut(Update) -> bool| {});
    assert_eq!(place.post(CHAT, &chat(json!({ "stream": false }))).status, 503);
}
