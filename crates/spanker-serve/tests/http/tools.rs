// SPDX-License-Identifier: Apache-2.0
//! Tools: what the model is told, what it calls, and answers that have to be calls.

use serde_json::{Value, json};

use crate::place::{Place, options, service_options};
use crate::script::{Voice, says};

const CHAT: &str = "/v1/chat/completions";
/// Templates that show tools, each in a manner of its own.
const TAGS: &str = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{# <tool_call> #}\
    {% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endfor %}";
const LIST: &str = "[TOOL_CALLS]{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}";
const OBJECT: &str = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{# \"parameters\": #}{% for m in messages %}{{ m.content }}{% endfor %}";

fn tools() -> Value {
    let weather = json!({
        "type": "object", "properties": { "city": { "type": "string", "maxLength": 4 } }, "required": ["city"],
        "additionalProperties": false,
    });
    json!([
        { "type": "function", "function": { "name": "weather", "description": "Says it.", "parameters": weather } },
        { "type": "function", "function": { "name": "time" } },
    ])
}

fn body(more: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "x" }], "tools": tools() });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

fn place(template: &str, voice: impl Voice) -> Place {
    Place::scripted_with(options(), Some(template), service_options(), voice)
}

/// The calls of a message: name and arguments.
fn calls(message: &Value) -> Vec<(String, Value)> {
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    calls
        .map(|call| {
            assert_eq!(call["type"], "function");
            assert_eq!(call["id"].as_str().map(str::len), Some(9), "{call}");
            let arguments = call["function"]["arguments"].as_str().expect("a text");
            let name = call["function"]["name"].as_str().expect("a name").to_owned();
            (
                name,
                serde_json::from_str(arguments)
                    .unwrap_or_else(|error| panic!("{arguments}: {error}")),
            )
        })
        .collect()
}

/// The message that a stream's pieces are together.
fn joined(chunks: &[Value]) -> Value {
    let mut message = json!({ "content": "", "tool_calls": [] });
    for chunk in chunks {
        let delta = &chunk["choices"][0]["delta"];
        if let Some(text) = delta["content"].as_str() {
            message["content"] =
                format!("{}{text}", message["content"].as_str().expect("text")).into();
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().expect("an index") as usize;
            let calls = message["tool_calls"].as_array_mut().expect("calls");
            if call.get("id").is_some() {
                assert_eq!(calls.len(), index);
                calls.push(call.clone());
            } else {
                let arguments = &mut calls[index]["function"]["arguments"];
                let more = call["function"]["arguments"].as_str().expect("text");
                *arguments = format!("{}{more}", arguments.as_str().expect("text")).into();
            }
        }
    }
    message
}

#[test]
fn calls_of_every_style_become_tool_calls_at_once_and_piece_by_piece() {
    let paris = || ("weather".to_owned(), json!({ "city": "P\u{e9}" }));
    let time = || ("time".to_owned(), json!({}));
    for (template, answer, content, expected) in [
        (
            TAGS,
            "Let me see.\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"P\u{e9}\"}}</tool_call>",
            "Let me see.",
            vec![paris()],
        ),
        (
            TAGS,
            "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"P\u{e9}\"}}</tool_call>\n<tool_call>\n{\"name\": \"time\"}\n</tool_call>",
            "",
            vec![paris(), time()],
        ),
        (
            LIST,
            "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"P\u{e9}\"}}, {\"name\": \"time\", \"arguments\": {}}]",
            "",
            vec![paris(), time()],
        ),
        (
            OBJECT,
            "{\"name\": \"weather\", \"parameters\": {\"city\": \"P\u{e9}\"}}",
            "",
            vec![paris()],
        ),
        // Of models whose template knows no tools.
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "<tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>",
            "",
            vec![time()],
        ),
    ] {
        let place = place(template, says(answer));
        let choice = place.post(CHAT, &body(json!({}))).ok()["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        assert_eq!(calls(&choice["message"]), expected);
        assert_eq!(choice["message"]["content"].as_str().unwrap_or_default(), content);
        assert_eq!(choice["message"]["content"].is_null(), content.is_empty());
        let chunks = place.post(CHAT, &body(json!({ "stream": true }))).chunks();
        let message = joined(&chunks);
        assert_eq!((calls(&message), &message["content"]), (expected, &json!(content)));
        assert_eq!(chunks.last().expect("chunks")["choices"][0]["finish_reason"], "tool_calls");
        // The arguments came in several pieces.
        let pieces =
            chunks.iter().filter(|chunk| chunk["choices"][0]["delta"]["tool_calls"].is_array());
        assert!(pieces.count() > 1, "{chunks:?}");
    }
}

#[test]
fn text_that_is_no_call_is_what_is_said() {
    for (template, answer) in [
        (TAGS, "a <tool_call> b"),
        (TAGS, "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>"),
        (OBJECT, "{\"city\": 5} and so on"),
    ] {
        let place = place(template, says(answer));
        let choice = place.post(CHAT, &body(json!({}))).ok()["choices"][0].clone();
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(answer), &json!("stop"))
        );
        let chunks = place.post(CHAT, &body(json!({ "stream": true }))).chunks();
        assert_eq!(joined(&chunks)["content"], answer);
    }
    // Without tools, or with tools that are not to be called, calls are text.
    let answer = "<tool_call>{\"name\": \"time\"}</tool_call>";
    let place = place(TAGS, says(answer));
    for body in [body(json!({ "tool_choice": "none" })), body(json!({ "tools": [] }))] {
        let choice = place.post(CHAT, &body).ok()["choices"][0].clone();
        assert_eq!(choice["message"]["content"], answer);
        assert!(choice["message"].get("tool_calls").is_none());
    }
}

#[test]
fn calls_end_with_the_first_where_only_one_is_wanted() {
    let two =
        "<tool_call>{\"name\": \"time\"}</tool_call><tool_call>{\"name\": \"time\"}</tool_call>";
    let place = place(TAGS, says(two));
    for stream in [false, true] {
        let body = body(json!({ "parallel_tool_calls": false, "stream": stream }));
        let response = place.post(CHAT, &body);
        let (message, reason) = match stream {
            false => {
                let choice = response.ok()["choices"][0].clone();
                (choice["message"].clone(), choice["finish_reason"].clone())
            }
            true => {
                let chunks = response.chunks();
                (
                    joined(&chunks),
                    chunks.last().expect("chunks")["choices"][0]["finish_reason"].clone(),
                )
            }
        };
        assert_eq!((calls(&message).len(), reason), (1, json!("tool_calls")));
    }
}

#[test]
fn answers_that_have_to_be_calls_are_whatever_the_model_would_say() {
    for template in [TAGS, LIST, OBJECT] {
        let place = place(template, says("I would rather talk."));
        for (choice, names) in [
            (json!("required"), &["weather", "time"][..]),
            (json!({ "type": "function", "function": { "name": "time" } }), &["time"]),
            (json!({ "type": "function", "function": { "name": "weather" } }), &["weather"]),
        ] {
            for stream in [false, true] {
                let body = body(json!({ "tool_choice": choice, "stream": stream }));
                let response = place.post(CHAT, &body);
                let message = match stream {
                    false => response.ok()["choices"][0]["message"].clone(),
                    true => joined(&response.chunks()),
                };
                let calls = calls(&message);
                assert_eq!(calls.len(), 1, "{message}");
                assert!(names.contains(&calls[0].0.as_str()), "{message}");
                assert!(calls[0].0 == "time" || calls[0].1["city"].is_string(), "{message}");
            }
        }
    }
}

#[test]
fn call_that_is_cut_off_says_so() {
    let place = place(
        TAGS,
        says(
            "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}</tool_call>",
        ),
    );
    let choice = place.post(CHAT, &body(json!({ "max_tokens": 55 }))).ok()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "length");
    let choice = place.post(CHAT, &body(json!({ "max_tokens": 5 }))).ok()["choices"][0].clone();
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!("<tool"), &json!("length"))
    );
}

#[test]
fn tools_and_their_answers_are_shown_to_the_model() {
    let conversation = json!([
        { "role": "user", "content": "x" },
        { "role": "assistant", "content": null, "tool_calls": [{ "id": "c1", "type": "function", "function": { "name": "time", "arguments": "{\"b\": 1, \"a\": [2]}" } }] },
        { "role": "tool", "tool_call_id": "c1", "content": "noon" },
    ]);
    let shown = |template: &str, conversation: &Value, tools: Value| -> String {
        let place = place(template, says(""));
        let body = json!({ "messages": conversation, "tools": tools });
        place.post("/apply-template", &body).ok()["prompt"].as_str().expect("text").to_owned()
    };
    let time = json!([{ "type": "function", "function": { "name": "time" } }]);
    assert_eq!(
        shown(TAGS, &conversation, time.clone()),
        "{\"type\": \"function\", \"function\": {\"name\": \"time\"}}<|im_start|>user:x<|im_end|><|im_start|>assistant:\
         [{\"id\": \"c1\", \"type\": \"function\", \"function\": {\"name\": \"time\", \"arguments\": {\"b\": 1, \"a\": [2]}}}]\
         <|im_end|><|im_start|>tool:noon<|im_end|>"
    );
    // A template that knows no tools: a system message lists them, and calls are text.
    let plain = "{% for m in messages %}|{{ m.role }}:{{ m.content }}{% endfor %}";
    let text = shown(plain, &conversation, time.clone());
    assert!(
        text.starts_with("|system:# Tools\n") && text.contains("<tools>\n{\"type\":\"function\""),
        "{text}"
    );
    assert!(text.contains("|assistant:<tool_call>\n{\"name\":\"time\",\"arguments\":{\"b\":1,\"a\":[2]}}\n</tool_call>"), "{text}");
    assert!(text.ends_with("|user:<tool_response>\nnoon\n</tool_response>"), "{text}");
    let own =
        json!([{ "role": "system", "content": "Be brief." }, { "role": "user", "content": "x" }]);
    assert!(shown(plain, &own, time.clone()).starts_with("|system:Be brief.\n\n# Tools\n"));
    // One that knows no system messages either: the first message has them.
    let users = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}|{{ m.content }}{% endfor %}";
    let user = json!([{ "role": "user", "content": "x" }]);
    let text = shown(users, &user, time);
    assert!(text.starts_with("|# Tools\n") && text.ends_with("\n\nx"), "{text}");
    assert_eq!(shown(users, &user, json!([])), "|x");
}

#[test]
fn forms_and_tools_do_not_go_together_unless_no_tool_is_called() {
    let place = place(TAGS, says("{}"));
    let format = json!({ "type": "json_object" });
    let response = place.post(CHAT, &body(json!({ "response_format": format })));
    assert_eq!(
        (response.status, &response.json()["error"]["param"]),
        (400, &json!("response_format"))
    );
    place.post(CHAT, &body(json!({ "response_format": format, "tool_choice": "none" }))).ok();
    // A tool that nothing can be called with.
    let impossible = json!([{ "type": "function", "function": { "name": "a", "parameters": { "type": "strin" } } }]);
    let response =
        place.post(CHAT, &body(json!({ "tools": impossible, "tool_choice": "required" })));
    assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!("tools")));
}
