// SPDX-License-Identifier: Apache-2.0
//! Who may ask: pages of other sites are turned away unless they are allowed, names that lead here by somebody else's
//! doing are not answered to, and where there is a key, it is asked for.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, HOST,
    HeaderName, HeaderValue, ORIGIN, VARY, X_CONTENT_TYPE_OPTIONS,
};
use hyper::{HeaderMap, Method, StatusCode};

use crate::app::App;
use crate::body::discard;
use crate::error::{ApiError, Result};
use crate::page;

/// Paths that everybody may ask for, beside those of the page.
const PUBLIC: [&str; 2] = ["/health", "/openapi.json"];

/// Lets a request pass or turns it away, and says to browsers whose pages may read the answer.
pub(crate) async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let origin = match origin(&app, request.headers()) {
        Ok(origin) => origin,
        Err(error) => {
            discard(request).await;
            return error.into_response();
        }
    };
    let asks = request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &origin {
        // A browser asks beforehand, without the key.
        Some(_) if request.method() == Method::OPTIONS && asks => preflight(),
        _ if is_public(request.uri().path()) || app.keys.allow(request.headers()) => {
            next.run(request).await
        }
        _ => {
            discard(request).await;
            ApiError::key().into_response()
        }
    };
    let headers = response.headers_mut();
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(origin) = origin {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("retry-after"));
        headers.insert(VARY, HeaderValue::from_static("origin"));
    }
    response
}

fn is_public(path: &str) -> bool {
    PUBLIC.contains(&path) || page::FILES.iter().any(|(file, ..)| *file == path)
}

/// The origin that may read the answer, if it is another site's and allowed.
fn origin(app: &App, headers: &HeaderMap) -> Result<Option<HeaderValue>> {
    let host = headers.get(HOST).map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned());
    let host = host.unwrap_or_default();
    // A page whose name leads here only for a while would be a page of this server. It has no key.
    if app.keys.are_none() && !is_own(&host, &app.options.host) {
        let shown: String = host.chars().filter(|one| !one.is_control()).take(100).collect();
        let what =
            format!("'{shown}' is no name of this server: ask for localhost, or set an API key");
        return Err(ApiError::origin(what));
    }
    let Some(origin) = headers.get(ORIGIN) else { return Ok(None) };
    let named = String::from_utf8_lossy(origin.as_bytes());
    if named.split_once("://").is_some_and(|(_, place)| place.eq_ignore_ascii_case(&host)) {
        return Ok(None);
    }
    let allowed = &app.options.origins;
    if allowed.iter().any(|one| one == "*") {
        return Ok(Some(HeaderValue::from_static("*")));
    }
    match allowed.iter().any(|one| one.eq_ignore_ascii_case(&named)) {
        true => Ok(Some(origin.clone())),
        false => Err(ApiError::origin("pages of other sites may not ask here: see --cors")),
    }
}

/// Whether a request is for this server by an address or its own name.
fn is_own(host: &str, listens: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let is_local = name.eq_ignore_ascii_case("localhost") || name.eq_ignore_ascii_case(listens);
    // Without a name there is no page behind it.
    is_local || name.is_empty() || address.parse::<IpAddr>().is_ok()
}

fn preflight() -> Response {
    let headers: [(HeaderName, &'static str); 3] = [
        (ACCESS_CONTROL_ALLOW_METHODS, "GET, POST"),
        (ACCESS_CONTROL_ALLOW_HEADERS, "authorization, content-type, x-api-key"),
        (ACCESS_CONTROL_MAX_AGE, "600"),
    ];
    let headers = headers.map(|(name, value)| (name, HeaderValue::from_static(value)));
    (StatusCode::NO_CONTENT, headers).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_sites_are_not_this_servers() {
        for host in [
            "localhost",
            "localhost:8080",
            "127.0.0.1:1",
            "[::1]:80",
            "[::1]",
            "10.0.0.1",
            "Box:80",
            "",
        ] {
            assert!(is_own(host, "box"), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example:80",
            ":x",
        ] {
            assert!(!is_own(host, "127.0.0.1"), "{host}");
        }
    }
}
