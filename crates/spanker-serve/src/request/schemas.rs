// SPDX-License-Identifier: Apache-2.0
//! JSON schemas of the fields that are more than a number or a flag, for the OpenAPI document. What reads these fields
//! has to take what they take; tests draw values from both sides.

use serde_json::{Value, json};

use super::tables::{MOST_BIASED, MOST_MESSAGES, MOST_NAME, MOST_STOP, MOST_STOPS, MOST_TOOLS};

pub(super) fn stop() -> Value {
    let text = json!({ "type": "string", "minLength": 1, "maxLength": MOST_STOP });
    json!({ "anyOf": [
        text,
        { "type": "array", "items": text, "maxItems": MOST_STOPS },
        { "type": "null" },
    ] })
}

pub(super) fn logit_bias() -> Value {
    json!({
        "type": ["object", "null"],
        "maxProperties": MOST_BIASED,
        "propertyNames": { "pattern": "^[0-9]{1,9}$" },
        "additionalProperties": { "type": "number", "minimum": -100, "maximum": 100 },
    })
}

pub(super) fn response_format() -> Value {
    let schema = json!({ "type": ["object", "boolean"], "description": "A JSON schema." });
    json!({ "anyOf": [
        {
            "type": "object",
            "properties": { "type": { "const": "text" } },
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": { "type": { "const": "json_object" }, "schema": schema },
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": { "const": "json_schema" },
                "json_schema": {
                    "type": "object",
                    "properties": { "name": { "type": ["string", "null"] }, "schema": schema },
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
        { "type": "null" },
    ] })
}

pub(super) fn messages() -> Value {
    let part = json!({
        "type": "object",
        "properties": { "type": { "const": "text" }, "text": { "type": "string" } },
        "required": ["type", "text"],
    });
    let content = json!({ "anyOf": [{ "type": "string" }, { "type": "array", "items": part }] });
    let maybe = json!({ "anyOf": [content, { "type": "null" }] });
    let text = json!({ "type": ["string", "null"] });
    let call = json!({
        "type": "object",
        "properties": {
            "id": text,
            "type": { "enum": ["function", null] },
            "function": {
                "type": "object",
                "properties": {
                    "name": name(),
                    "arguments": { "type": ["string", "object", "null"] },
                },
                "required": ["name"],
            },
        },
        "required": ["function"],
    });
    let said = json!({
        "type": "object",
        "properties": {
            "role": { "enum": ["system", "developer", "user", "tool"] },
            "content": content,
            "name": text,
            "tool_call_id": text,
        },
        "required": ["role", "content"],
    });
    let answered = json!({
        "type": "object",
        "properties": { "role": { "const": "assistant" }, "content": content, "name": text },
        "required": ["role", "content"],
    });
    let called = json!({
        "type": "object",
        "properties": {
            "role": { "const": "assistant" },
            "content": maybe,
            "name": text,
            "tool_calls": { "type": "array", "items": call, "minItems": 1, "maxItems": MOST_TOOLS },
        },
        "required": ["role", "tool_calls"],
    });
    let items = json!({ "anyOf": [said, called, answered] });
    json!({ "type": "array", "minItems": 1, "maxItems": MOST_MESSAGES, "items": items })
}

fn name() -> Value {
    json!({ "type": "string", "pattern": format!("^[a-zA-Z0-9_.-]{{1,{MOST_NAME}}}$") })
}

pub(super) fn tools() -> Value {
    let function = json!({
        "type": "object",
        "properties": {
            "name": name(),
            "description": { "type": ["string", "null"] },
            "parameters": { "type": ["object", "null"], "description": "A JSON schema." },
        },
        "required": ["name"],
    });
    let tool = json!({
        "type": "object",
        "properties": { "type": { "const": "function" }, "function": function },
        "required": ["type", "function"],
    });
    json!({ "type": ["array", "null"], "maxItems": MOST_TOOLS, "items": tool })
}

pub(super) fn tool_choice() -> Value {
    json!({ "anyOf": [
        { "enum": ["none", "auto", "required", null] },
        {
            "type": "object",
            "properties": {
                "type": { "const": "function" },
                "function": {
                    "type": "object",
                    "properties": { "name": name() },
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ] })
}

/// A list of tokens.
pub(super) fn tokens() -> Value {
    let token = json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX });
    json!({ "type": "array", "items": token })
}

pub(super) fn prompt() -> Value {
    let text = json!({ "type": "string" });
    let list = |items: &Value| json!({ "type": "array", "items": items, "minItems": 1 });
    let mut tokens = tokens();
    tokens["minItems"] = 1.into();
    json!({ "anyOf": [text, list(&text), tokens, list(&tokens)] })
}
