// SPDX-License-Identifier: Apache-2.0
//! Answers that a schema describes, whatever the model would say.

use serde_json::{Value, json};

use crate::place::Place;
use crate::script::says;

fn answer(place: &Place, format: &Value, stream: bool) -> Value {
    let body = json!({ "prompt": "x", "response_format": format, "stream": stream });
    let response = place.post("/v1/completions", &body);
    let text: String = match stream {
        false => response.ok()["choices"][0]["text"].as_str().expect("text").to_owned(),
        true => response
            .chunks()
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["text"].as_str())
            .collect(),
    };
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text:?}: {error}"))
}

#[test]
fn answers_keep_to_the_schema_that_a_request_has() {
    let place = Place::scripted(says("I would rather talk."));
    let schema = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "minLength": 2, "maxLength": 5 },
            "tags": { "type": "array", "items": { "enum": ["a", "b"] }, "minItems": 1, "maxItems": 2 },
        },
        "required": ["name", "tags"],
        "additionalProperties": false,
    });
    for stream in [false, true] {
        let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "strict": true, "schema": schema } });
        let value = answer(&place, &format, stream);
        assert!(
            value["name"].as_str().is_some_and(|name| (2..=5).contains(&name.chars().count())),
            "{value}"
        );
        assert!(
            value["tags"].as_array().is_some_and(|tags| (1..=2).contains(&tags.len())),
            "{value}"
        );
        assert!(answer(&place, &json!({ "type": "json_object" }), stream).is_object());
        let format = json!({ "type": "json_object", "schema": { "const": { "a": 1 } } });
        assert_eq!(answer(&place, &format, stream), json!({ "a": 1 }));
    }
    let chat = json!({ "messages": [{ "role": "user", "content": "x" }], "n": 2, "response_format": { "type": "json_object" } });
    let whole = place.post("/v1/chat/completions", &chat).ok();
    for choice in whole["choices"].as_array().expect("choices") {
        let text = choice["message"]["content"].as_str().expect("text");
        assert!(serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object()), "{text}");
        assert_eq!(choice["finish_reason"], "stop");
    }
}

#[test]
fn schemas_that_no_answer_can_be_held_to_are_refused_with_what_is_wrong() {
    let place = Place::scripted(says("x"));
    for (schema, said) in [
        (json!({ "type": "strin" }), "strin"),
        (json!(false), "nothing"),
        (json!({ "not": {} }), "not"),
        (json!({ "type": "integer", "multipleOf": 123_456_789 }), "multipleOf"),
        (json!({ "type": "string", "pattern": "(a{1000}){1000}" }), "patterns"),
    ] {
        let format = json!({ "type": "json_schema", "json_schema": { "schema": schema } });
        let body = json!({ "prompt": "x", "response_format": format });
        let response = place.post("/v1/completions", &body);
        let error = response.json()["error"].clone();
        assert_eq!((response.status, &error["param"]), (400, &json!("response_format")), "{error}");
        assert!(error["message"].as_str().is_some_and(|message| message.contains(said)), "{error}");
    }
}
