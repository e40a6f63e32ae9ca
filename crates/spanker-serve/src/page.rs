// SPDX-License-Identifier: Apache-2.0
//! The page: a chat, and what the cards are doing. Its files are part of the program, and it loads nothing from
//! anywhere else.

use axum::response::{IntoResponse, Response};
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, REFERRER_POLICY,
};

/// What the page may do: nothing but what its own files do, and ask this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The files: path, kind and content.
pub(crate) const FILES: [(&str, &str, &str); 5] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("/chat.js", "text/javascript; charset=utf-8", include_str!("page/chat.js")),
    ("/cards.js", "text/javascript; charset=utf-8", include_str!("page/cards.js")),
    ("/icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
];

/// One of the files.
pub(crate) fn file(kind: &'static str, content: &'static str) -> Response {
    let headers = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers.map(|(name, value)| (name, HeaderValue::from_static(value))), content).into_response()
}
