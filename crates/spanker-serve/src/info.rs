// SPDX-License-Identifier: Apache-2.0
//! What the server says of itself: whether it is well, what it serves, what it is doing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::response::{IntoResponse, Response};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde_json::{Value, json};
use spanker_engine::{CardStatus, Status};
use spanker_text::Settings;

use crate::app::{App, Loaded};
use crate::error::{ApiError, Result};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// `GET /health`.
pub(crate) fn health(app: &App) -> Result<Value> {
    app.ready().map(|_| json!({ "status": "ok" }))
}

/// `GET /v1/models`.
pub(crate) fn models(app: &App) -> Value {
    json!({ "object": "list", "data": [model_entry(app)] })
}

/// `GET /v1/models/{id}`.
///
/// # Errors
/// A model that is not served.
pub(crate) fn model(app: &App, name: &str) -> Result<Value> {
    let names = app.names();
    match names.iter().any(|known| known == name) {
        true => Ok(model_entry(app)),
        false => Err(ApiError::model(name, &names[0])),
    }
}

fn model_entry(app: &App) -> Value {
    let meta = app.loaded().map(|loaded| {
        let shape = loaded.model().shape();
        json!({
            "n_vocab": shape.vocab,
            "n_ctx": loaded.context(),
            "n_ctx_train": loaded.model().trained_context(),
            "n_embd": shape.hidden,
        })
    });
    json!({
        "id": app.options.name, "object": "model", "created": app.started.1, "owned_by": "spanker",
        "meta": meta,
    })
}

/// `GET /props`.
pub(crate) fn props(app: &App, loaded: &Loaded) -> Value {
    let usual = Settings::usual(0);
    let tokenizer = loaded.model().tokenizer();
    let piece = |token: Option<u32>| {
        token.map(|token| String::from_utf8_lossy(tokenizer.piece(token)).into_owned())
    };
    json!({
        "default_generation_settings": {
            "n_ctx": loaded.context(),
            "params": {
                "temperature": usual.temperature,
                "top_k": usual.top_k,
                "top_p": usual.top_p,
                "min_p": usual.min_p,
                "repeat_penalty": usual.penalties.repeat,
                "repeat_last_n": usual.penalties.last,
                "presence_penalty": usual.penalties.presence,
                "frequency_penalty": usual.penalties.frequency,
            },
        },
        "total_slots": loaded.backend.options().parallel,
        "model_alias": app.options.name,
        "model_path": loaded.model().path().file_name().map(|name| name.to_string_lossy()),
        "chat_template": loaded.template,
        "bos_token": piece(tokenizer.bos()),
        "eos_token": piece(tokenizer.eos()),
        "build_info": format!("spanker {VERSION}"),
    })
}

/// `GET /slots`: who is answered, without what was said.
pub(crate) fn slots(app: &App, loaded: &Loaded) -> Value {
    let running = app.slots.running();
    let places = running.len().max(loaded.backend.options().parallel);
    let slot = |at: usize| {
        let slot = running.get(at).and_then(Option::as_ref);
        let count = |count: &std::sync::atomic::AtomicUsize| count.load(Ordering::Relaxed);
        json!({
            "id": at,
            "n_ctx": loaded.context(),
            "is_processing": slot.is_some(),
            "id_task": slot.map(|slot| slot.task),
            "prompt_tokens": slot.map(|slot| slot.prompt_tokens),
            "cached_tokens": slot.map(|slot| count(&slot.cached_tokens)),
            "tokens": slot.map(|slot| count(&slot.tokens)),
            "seconds": slot.map(|slot| slot.began.elapsed().as_secs_f64()),
        })
    };
    (0..places).map(slot).collect()
}

/// `GET /metrics`.
pub(crate) fn metrics(app: &App) -> Response {
    let status = app.loaded().map(|loaded| loaded.backend.status());
    let text = app.metrics.text(status.as_ref(), app.connected.load(Ordering::Relaxed));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(CONTENT_TYPE, kind)], text).into_response()
}

/// `GET /status`.
pub(crate) fn status(app: &App) -> Value {
    let loaded = app.loaded();
    let status = loaded.as_ref().map(|loaded| loaded.backend.status());
    let state = match &status {
        _ if app.is_ending() => "ending",
        None => "loading",
        Some(status) if status.broken.is_some() => "broken",
        Some(_) => "ready",
    };
    let mut json = json!({
        "state": state,
        "model": app.options.name,
        "version": VERSION,
        "uptime_seconds": app.started.0.elapsed().as_secs_f64(),
    });
    if let (Some(loaded), Some(status)) = (&loaded, &status) {
        let options = loaded.backend.options();
        json["context"] = options.context.into();
        json["parallel"] = options.parallel.into();
        add(&mut json, status);
    }
    json
}

fn add(json: &mut Value, status: &Status) {
    let mean = |seconds: f64| (status.steps > 0).then(|| seconds * 1e3 / status.steps as f64);
    let kv = status.kv;
    let expected = status
        .expected
        .iter()
        .map(|(clients, rate)| json!({ "clients": clients, "tokens_per_second": rate }));
    let fields = json!({
        "fabric": status.fabric,
        "layout": status.layout,
        "copies": status.copies,
        "cards": status.cards.iter().map(card).collect::<Vec<_>>(),
        "links": status.links,
        "running": status.running,
        "waiting": status.waiting,
        "answered": status.answered,
        "failed": status.failed,
        "cancelled": status.cancelled,
        "refused": status.refused,
        "prompt_tokens": status.prompt_tokens,
        "cached_tokens": status.cached_tokens,
        "tokens": status.tokens,
        "steps": status.steps,
        "step_ms": { "measured": mean(status.step_seconds.0), "predicted": mean(status.step_seconds.1) },
        "tokens_per_second": { "measured": status.rate.0, "predicted": status.rate.1 },
        "cards_lost": status.cards_lost,
        "cards_back": status.cards_back,
        "recomputed": status.recomputed,
        "draft": { "steps": status.draft.steps, "guessed": status.draft.guessed,
            "accepted": status.draft.accepted, "refused": status.draft.refused() },
        "kv_blocks": { "total": kv.total, "used": kv.used, "cached": kv.cached, "tokens": kv.tokens },
        "expected": expected.collect::<Vec<_>>(),
        "broken": status.broken,
    });
    if let (Some(json), Value::Object(fields)) = (json.as_object_mut(), fields) {
        json.extend(fields);
    }
}

fn card(card: &CardStatus) -> Value {
    let [weights, kv, buffers] = card.bytes;
    json!({
        "number": card.number,
        "profile": card.profile,
        "state": card.state.name(),
        "copy": card.copy,
        "stage": card.stage,
        "layers": [card.layers.start, card.layers.end],
        "heads": [card.heads.0, card.heads.1],
        "bytes": { "weights": weights, "kv": kv, "buffers": buffers },
        "capacity": card.capacity,
        "busy": card.busy,
        "waiting": card.waiting,
    })
}

/// The answer of whatever can be said at once.
pub(crate) fn said(app: &Arc<App>, say: impl FnOnce(&App, &Loaded) -> Value) -> Result<Value> {
    let loading = || ApiError::busy("loading", "the model is being loaded");
    let loaded = app.loaded().ok_or_else(loading)?;
    Ok(say(app, &loaded))
}
