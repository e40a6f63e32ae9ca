// SPDX-License-Identifier: Apache-2.0
//! The OpenAPI document. Fields of requests come from the tables that requests are read by; tests compare paths with
//! those of the router.

use serde_json::{Map, Value, json};

use crate::app::App;
use crate::request::fields::Field;
use crate::request::tables;

/// What a path takes and gives.
struct Operation {
    path: &'static str,
    id: &'static str,
    about: &'static str,
    /// The fields of its body, for those that have one; those that must be there come first.
    fields: Vec<&'static Field>,
    required: &'static [&'static str],
    /// What it answers, and as what.
    kind: &'static str,
    schema: Value,
    /// Whether answers can come piece by piece.
    streams: bool,
    /// Other statuses that it answers with.
    errors: &'static [u16],
    needs_key: bool,
}

/// Of requests that are read: they can be wrong in many ways.
const READ: &[u16] = &[400, 404, 408, 413, 415, 503];
/// Of requests that become answers.
const ANSWER: &[u16] = &[400, 404, 408, 413, 415, 429, 503];

const JSON: &str = "application/json";

impl Operation {
    fn get(path: &'static str, id: &'static str, about: &'static str, schema: Value) -> Operation {
        let (fields, required, errors) = (Vec::new(), &[][..], &[503][..]);
        let (kind, streams, needs_key) = (JSON, false, true);
        Operation { path, id, about, fields, required, kind, schema, streams, errors, needs_key }
    }

    fn post(
        path: &'static str,
        id: &'static str,
        about: &'static str,
        (fields, required): (Vec<&'static Field>, &'static [&'static str]),
        schema: Value,
    ) -> Operation {
        Operation { fields, required, errors: READ, ..Operation::get(path, id, about, schema) }
    }

    fn is_post(&self) -> bool {
        !self.fields.is_empty()
    }

    /// The operation in the document.
    fn json(&self) -> Value {
        let answer = json!({ self.kind: { "schema": self.schema } });
        let mut content = answer;
        if self.streams {
            content["text/event-stream"] = json!({ "schema": { "type": "string" } });
        }
        let mut responses = Map::new();
        responses.insert("200".into(), json!({ "description": "OK", "content": content }));
        let denied = if self.needs_key { &[401, 403][..] } else { &[403][..] };
        for status in denied.iter().chain(self.errors) {
            let reference = json!({ "$ref": "#/components/responses/Error" });
            responses.insert(status.to_string(), reference);
        }
        let mut operation = json!({
            "operationId": self.id, "summary": self.about, "responses": responses,
        });
        if !self.needs_key {
            operation["security"] = json!([]);
        }
        if self.path.contains("{id}") {
            operation["parameters"] = json!([
                { "name": "id", "in": "path", "required": true, "schema": { "type": "string" } },
            ]);
        }
        if self.is_post() {
            let properties: Map<String, Value> =
                self.fields.iter().map(|field| (field.name.to_owned(), field.schema())).collect();
            let schema = json!({
                "type": "object", "properties": properties, "required": self.required,
            });
            operation["requestBody"] =
                json!({ "required": true, "content": { JSON: { "schema": schema } } });
        }
        operation
    }
}

fn object(properties: Value) -> Value {
    let required: Vec<&String> = properties.as_object().into_iter().flat_map(Map::keys).collect();
    json!({ "type": "object", "required": required, "properties": properties })
}

fn list(items: Value) -> Value {
    json!({ "type": "array", "items": items })
}

fn text() -> Value {
    json!({ "type": "string" })
}

fn count() -> Value {
    json!({ "type": "integer", "minimum": 0 })
}

fn usage() -> Value {
    object(json!({
        "prompt_tokens": count(), "completion_tokens": count(), "total_tokens": count(),
        "prompt_tokens_details": object(json!({ "cached_tokens": count() })),
    }))
}

/// An answer with these choices.
fn answer(name: &str, choice: Value) -> Value {
    object(json!({
        "id": text(), "object": { "const": name }, "created": count(), "model": text(),
        "system_fingerprint": text(), "choices": list(choice), "usage": usage(),
    }))
}

fn chat_choice() -> Value {
    let call = object(json!({
        "id": text(), "type": { "const": "function" },
        "function": object(json!({ "name": text(), "arguments": text() })),
    }));
    let mut message = object(json!({
        "role": { "const": "assistant" }, "content": { "type": ["string", "null"] },
    }));
    message["properties"]["tool_calls"] = list(call);
    object(json!({
        "index": count(), "message": message, "logprobs": { "type": ["object", "null"] },
        "finish_reason": { "enum": ["stop", "length", "tool_calls"] },
    }))
}

fn completion_choice() -> Value {
    object(json!({
        "index": count(), "text": text(), "logprobs": { "type": ["object", "null"] },
        "finish_reason": { "enum": ["stop", "length"] },
    }))
}

fn model() -> Value {
    object(json!({
        "id": text(), "object": { "const": "model" }, "created": count(), "owned_by": text(),
        "meta": { "type": ["object", "null"] },
    }))
}

fn token() -> Value {
    let piece = json!({ "anyOf": [text(), list(count())] });
    json!({ "anyOf": [count(), object(json!({ "id": count(), "piece": piece }))] })
}

/// What is generated.
fn answers() -> Vec<Operation> {
    let shared = || tables::SHARED.iter().copied();
    vec![
        Operation {
            streams: true,
            errors: ANSWER,
            ..Operation::post(
                "/v1/chat/completions",
                "chat",
                "The next message of a conversation.",
                (tables::CHAT.iter().copied().chain(shared()).collect(), &["messages"]),
                answer("chat.completion", chat_choice()),
            )
        },
        Operation {
            streams: true,
            errors: ANSWER,
            ..Operation::post(
                "/v1/completions",
                "complete",
                "Text that follows other text.",
                (tables::COMPLETION.iter().copied().chain(shared()).collect(), &["prompt"]),
                answer("text_completion", completion_choice()),
            )
        },
    ]
}

/// What is about text and tokens.
fn texts() -> Vec<Operation> {
    vec![
        Operation::post(
            "/tokenize",
            "tokenize",
            "The tokens of a text.",
            (tables::TOKENIZE.to_vec(), &["content"]),
            object(json!({ "tokens": list(token()) })),
        ),
        Operation::post(
            "/detokenize",
            "detokenize",
            "The text of tokens.",
            (tables::DETOKENIZE.to_vec(), &["tokens"]),
            object(json!({ "content": text() })),
        ),
        Operation::post(
            "/apply-template",
            "applyTemplate",
            "A conversation as the text that the model reads.",
            (tables::TEMPLATE.to_vec(), &["messages"]),
            object(json!({ "prompt": text() })),
        ),
    ]
}

/// What the server says of itself.
fn infos() -> Vec<Operation> {
    let any = || json!({ "type": "object" });
    let models = object(json!({ "object": { "const": "list" }, "data": list(model()) }));
    let slot = json!({
        "type": "object",
        "required": ["id", "n_ctx", "is_processing"],
        "properties": { "id": count(), "n_ctx": count(), "is_processing": { "type": "boolean" } },
    });
    let well = object(json!({ "status": { "const": "ok" } }));
    let status = json!({
        "type": "object",
        "required": ["state", "model", "version", "uptime_seconds"],
        "properties": { "state": { "enum": ["loading", "ready", "ending", "broken"] } },
    });
    vec![
        Operation {
            needs_key: false,
            ..Operation::get("/health", "health", "Whether requests are answered.", well)
        },
        Operation {
            errors: &[],
            ..Operation::get("/v1/models", "models", "The model that is served.", models)
        },
        Operation {
            errors: &[404],
            ..Operation::get("/v1/models/{id}", "model", "A model, if it is served.", model())
        },
        Operation::get("/props", "props", "The model and what is usual.", any()),
        Operation::get("/slots", "slots", "Who is answered.", list(slot)),
        Operation {
            errors: &[],
            ..Operation::get("/status", "status", "What the cards are doing.", status)
        },
        Operation {
            errors: &[],
            kind: "text/plain",
            ..Operation::get("/metrics", "metrics", "Metrics, as Prometheus reads them.", text())
        },
        Operation {
            errors: &[],
            needs_key: false,
            ..Operation::get("/openapi.json", "openapi", "This document.", any())
        },
    ]
}

/// The document.
pub(crate) fn document(app: &App) -> Value {
    let mut paths = Map::new();
    for operation in answers().iter().chain(&texts()).chain(&infos()) {
        let method = if operation.is_post() { "post" } else { "get" };
        paths.insert(operation.path.to_owned(), json!({ method: operation.json() }));
    }
    let maybe = json!({ "type": ["string", "null"] });
    let error = object(json!({ "error": object(json!({
        "message": text(), "type": text(), "param": maybe, "code": maybe,
    })) }));
    let response =
        json!({ "description": "What is wrong.", "content": { JSON: { "schema": error } } });
    let mut components = json!({ "responses": { "Error": response } });
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Spanker",
            "version": env!("CARGO_PKG_VERSION"),
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "paths": paths,
    });
    if !app.keys.are_none() {
        components["securitySchemes"] = json!({ "key": { "type": "http", "scheme": "bearer" } });
        document["security"] = json!([{ "key": [] }]);
    }
    document["components"] = components;
    document
}
