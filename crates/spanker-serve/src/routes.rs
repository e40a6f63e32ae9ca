// SPDX-License-Identifier: Apache-2.0
//! Which path does what.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::Value;

use crate::app::App;
use crate::body::{Received, discard, receive};
use crate::error::{ApiError, Result};
use crate::guard::guard;
use crate::reply::json_response;
use crate::{generate, info, openapi, page, texts};

type Shared = State<Arc<App>>;

/// All paths.
pub(crate) fn router(app: &Arc<App>) -> Router {
    let mut router = Router::new();
    for (path, kind, content) in page::FILES {
        router = router.route(path, get(move || async move { page::file(kind, content) }));
    }
    router
        .route("/health", get(|State(app): Shared| async move { json(info::health(&app)) }))
        .route("/v1/models", get(|State(app): Shared| async move { json(Ok(info::models(&app))) }))
        .route("/v1/models/{id}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(complete))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/apply-template", post(apply_template))
        .route(
            "/props",
            get(|State(app): Shared| async move { json(info::said(&app, info::props)) }),
        )
        .route(
            "/slots",
            get(|State(app): Shared| async move { json(info::said(&app, info::slots)) }),
        )
        .route("/status", get(|State(app): Shared| async move { json(Ok(info::status(&app))) }))
        .route("/metrics", get(|State(app): Shared| async move { info::metrics(&app) }))
        .route(
            "/openapi.json",
            get(|State(app): Shared| async move { json(Ok(openapi::document(&app))) }),
        )
        .fallback(|request: Request| async move {
            let error = ApiError::path(request.uri().path());
            discard(request).await;
            error
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let error = ApiError::method(request.method().as_str());
            discard(request).await;
            error
        })
        .layer(from_fn_with_state(Arc::clone(app), guard))
        .with_state(Arc::clone(app))
}

fn json(said: Result<Value>) -> Response {
    said.map_or_else(IntoResponse::into_response, |value| json_response(&value))
}

fn whole(said: Result<Response>) -> Response {
    said.unwrap_or_else(IntoResponse::into_response)
}

/// The body of a request that the server has something to do with.
async fn body(app: &Arc<App>, request: Request) -> Result<Received> {
    if let Err(error) = app.ready() {
        discard(request).await;
        return Err(error);
    }
    receive(app, request).await
}

async fn model(State(app): Shared, Path(id): Path<String>) -> Response {
    json(info::model(&app, &id))
}

async fn chat(State(app): Shared, request: Request) -> Response {
    whole(async { generate::chat(Arc::clone(&app), body(&app, request).await?).await }.await)
}

async fn complete(State(app): Shared, request: Request) -> Response {
    whole(async { generate::complete(Arc::clone(&app), body(&app, request).await?).await }.await)
}

async fn tokenize(State(app): Shared, request: Request) -> Response {
    json(async { texts::tokenize(Arc::clone(&app), body(&app, request).await?).await }.await)
}

async fn detokenize(State(app): Shared, request: Request) -> Response {
    json(async { texts::detokenize(Arc::clone(&app), body(&app, request).await?).await }.await)
}

async fn apply_template(State(app): Shared, request: Request) -> Response {
    json(async { texts::apply_template(Arc::clone(&app), body(&app, request).await?).await }.await)
}
