// SPDX-License-Identifier: Apache-2.0
//! Text and tokens without answers: `/tokenize`, `/detokenize` and `/apply-template`.

use std::sync::Arc;

use serde_json::{Value, json};
use spanker_engine::EngineError;

use crate::app::App;
use crate::body::Received;
use crate::error::{ApiError, Result};
use crate::request::{DetokenizeRequest, TemplateRequest, TokenizeRequest};

/// `POST /tokenize`.
pub(crate) async fn tokenize(app: Arc<App>, body: Received) -> Result<Value> {
    let read = app.read(body, |loaded, body| {
        let request = TokenizeRequest::of(&body)?;
        let tokenizer = loaded.model().tokenizer();
        let TokenizeRequest { content, add_special, parse_special, with_pieces } = request;
        let begins = add_special && tokenizer.add_bos();
        let tokens = tokenizer.encode(&content, begins, parse_special);
        if !with_pieces {
            return Ok(json!({ "tokens": tokens }));
        }
        // What is no text by itself is shown as bytes.
        let piece = |token: &u32| {
            let bytes = tokenizer.piece(*token);
            let piece =
                std::str::from_utf8(bytes).map_or_else(|_| json!(bytes), |text| json!(text));
            json!({ "id": token, "piece": piece })
        };
        Ok(json!({ "tokens": tokens.iter().map(piece).collect::<Vec<_>>() }))
    });
    Ok(read.await?.1)
}

/// `POST /detokenize`.
pub(crate) async fn detokenize(app: Arc<App>, body: Received) -> Result<Value> {
    let read = app.read(body, |loaded, body| {
        let request = DetokenizeRequest::of(&body, &loaded.served)?;
        Ok(json!({ "content": loaded.model().tokenizer().decode(&request.tokens) }))
    });
    Ok(read.await?.1)
}

/// `POST /apply-template`.
pub(crate) async fn apply_template(app: Arc<App>, body: Received) -> Result<Value> {
    let read = app.read(body, |loaded, body| {
        let TemplateRequest { messages, tools } = TemplateRequest::of(&body)?;
        let (messages, tools) = loaded.abilities.prepare(messages, &tools);
        let wrong = |error: EngineError| match error {
            EngineError::Text(said) => ApiError::field("messages", said),
            other => other.into(),
        };
        let prompt = loaded.model().chat(&messages, &tools).map_err(wrong)?;
        Ok(json!({ "prompt": prompt.text }))
    });
    Ok(read.await?.1)
}
