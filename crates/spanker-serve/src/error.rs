// SPDX-License-Identifier: Apache-2.0
//! What a client is told when something is wrong: a status, and a body in the form that OpenAI's clients read.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use serde_json::{Value, json};
use spanker_engine::{EngineError, Refusal};

/// An answer that is an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    /// What kind of error it is, for programs.
    kind: &'static str,
    /// Which one it is, for programs.
    code: Option<&'static str>,
    /// What is wrong, with the value, for people.
    pub(crate) message: String,
    /// The field that is wrong.
    pub(crate) param: Option<String>,
    /// Seconds after which the same may be possible; 0 says nothing.
    retry_after: u32,
}

/// What comes of a request.
pub(crate) type Result<T, E = ApiError> = std::result::Result<T, E>;

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        let message = message.into();
        ApiError { status, kind, code: None, message, param: None, retry_after: 0 }
    }

    fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// A request that makes no sense as a whole.
    pub(crate) fn request(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field whose value makes no sense.
    pub(crate) fn field(param: impl Into<String>, message: impl std::fmt::Display) -> ApiError {
        let param = param.into();
        let message = format!("{param}: {message}");
        ApiError { param: Some(param), ..ApiError::request(message) }.with_code("invalid_value")
    }

    /// A prompt that there is no room for.
    pub(crate) fn too_long(param: &str, message: impl std::fmt::Display) -> ApiError {
        ApiError::field(param, message).with_code("context_length_exceeded")
    }

    /// A model that is not the one that is served.
    pub(crate) fn model(asked: &str, served: &str) -> ApiError {
        let message = format!("model: '{asked}' is not served here; '{served}' is");
        let param = Some("model".to_owned());
        ApiError { param, ..ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message) }
            .with_code("model_not_found")
    }

    /// A path that leads nowhere.
    pub(crate) fn path(path: &str) -> ApiError {
        let path: String = path.chars().take(100).collect();
        ApiError::new(StatusCode::NOT_FOUND, "not_found_error", format!("nothing is at '{path}'"))
    }

    /// A method that a path does not have.
    pub(crate) fn method(method: &str) -> ApiError {
        let method: String = method.chars().take(20).collect();
        let message = format!("{method} is not possible here");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    /// A request without the key.
    pub(crate) fn key() -> ApiError {
        let message = "no API key, or a wrong one: send 'Authorization: Bearer KEY'";
        ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
            .with_code("invalid_api_key")
    }

    /// A page of another site.
    pub(crate) fn origin(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// A body that did not come in time.
    pub(crate) fn slow(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
    }

    /// A body that is too large.
    pub(crate) fn large(most: usize) -> ApiError {
        let message = format!("the body is larger than {most} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// A body of another kind.
    pub(crate) fn media(kind: &str) -> ApiError {
        let kind: String = kind.chars().take(100).collect();
        let message = format!("'{kind}' cannot be read: send application/json");
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        ApiError::new(status, "invalid_request_error", message)
    }

    /// More requests than there is room for.
    pub(crate) fn full(message: impl Into<String>, retry_after: Duration) -> ApiError {
        let seconds = retry_after.as_secs_f64().ceil().clamp(1.0, 86_400.0);
        let full = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        ApiError { retry_after: seconds as u32, ..full.with_code("rate_limit_exceeded") }
    }

    /// A service that does not answer: `code` says why.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", message)
            .with_code(code)
    }

    /// The same, until in a moment.
    pub(crate) fn busy(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { retry_after: 1, ..ApiError::unavailable(code, message) }
    }

    /// The server is ending.
    pub(crate) fn ending() -> ApiError {
        ApiError::unavailable("ending", "the server is ending")
    }

    /// Something that should not be.
    pub(crate) fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// An answer that could not be completed.
    pub(crate) fn failed(what: &str, is_request: bool) -> ApiError {
        match is_request {
            true => ApiError::request(what),
            false => ApiError::unavailable("failed", what),
        }
    }

    /// The body, also as the last event of a stream that cannot go on.
    pub(crate) fn to_json(&self) -> Value {
        let ApiError { kind, code, message, param, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        let said = refusal.to_string();
        match refusal {
            Refusal::Full { retry_after, .. } => ApiError::full(said, retry_after),
            Refusal::Invalid(error) => error.into(),
            Refusal::Ending => ApiError::ending(),
            _ => ApiError::unavailable("broken", said),
        }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> ApiError {
        match &error {
            EngineError::Prompt { what, .. } => ApiError::too_long("prompt", what),
            EngineError::Request { what, .. } => ApiError::request(what),
            EngineError::Text(what) => ApiError::request(what.to_string()),
            _ => ApiError::internal(error.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.to_json().to_string().into_response();
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if self.retry_after > 0 {
            headers.insert(RETRY_AFTER, HeaderValue::from(self.retry_after));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
