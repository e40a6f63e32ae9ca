// SPDX-License-Identifier: Apache-2.0
//! Keys, TLS, addresses that others can reach, and pages of other sites.

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use spanker_serve::{ServeError, ServeOptions, Server, TlsFiles};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto::ring,
};

use crate::client::{Connection, Response, connect};
use crate::place::{Place, options, service_options, until};
use crate::script::says;

fn ask(place: &Place, method: &str, path: &str, headers: &[(&str, &str)]) -> Response {
    let mut connection = connect(place.address);
    let body = if method == "POST" { &b"{\"prompt\": \"x\"}"[..] } else { b"" };
    connection.ask(method, path, headers, body);
    connection.response().expect("an answer")
}

fn with(options: ServeOptions) -> Place {
    Place::scripted_with(options, None, service_options(), says("hello"))
}

#[test]
fn key_is_asked_for_everywhere_but_where_nothing_is_to_be_had() {
    let place = with(ServeOptions { keys: vec!["one".into(), "two".into()], ..options() });
    let paths = [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("GET", "/props"),
        ("GET", "/slots"),
        ("GET", "/status"),
        ("GET", "/metrics"),
        ("GET", "/nothing"),
        ("GET", "/v1/completions"),
    ];
    for (method, path) in paths {
        for headers in [
            &[][..],
            &[("authorization", "Bearer three")],
            &[("authorization", "one")],
            &[("x-api-key", "")],
        ] {
            let response = ask(&place, method, path, headers);
            let error = response.json()["error"].clone();
            assert_eq!(
                (response.status, &error["code"]),
                (401, &json!("invalid_api_key")),
                "{method} {path} {headers:?}"
            );
            assert_eq!(response.header("www-authenticate"), Some("Bearer"));
        }
        for headers in [
            [("authorization", "Bearer one")],
            [("authorization", "bearer two")],
            [("x-api-key", "two")],
        ] {
            assert_ne!(ask(&place, method, path, &headers).status, 401, "{method} {path}");
        }
    }
    for path in
        ["/", "/chat.js", "/cards.js", "/style.css", "/icon.svg", "/health", "/openapi.json"]
    {
        assert_eq!(ask(&place, "GET", path, &[]).status, 200, "{path}");
    }
    let document = ask(&place, "GET", "/openapi.json", &[]).json();
    assert_eq!(document["components"]["securitySchemes"]["key"]["scheme"], "bearer");
}

#[test]
fn body_of_a_request_without_the_key_is_not_read() {
    let place = with(ServeOptions { keys: vec!["one".into()], ..options() });
    let mut connection = connect(place.address);
    connection.ask("POST", "/v1/completions", &[("content-length", "1000000")], b"{");
    assert_eq!(connection.response().expect("an answer").status, 401);
}

#[test]
fn addresses_that_others_can_reach_need_a_key() {
    for host in ["0.0.0.0", "::"] {
        let open = ServeOptions { host: host.into(), ..options() };
        let error = Server::bind(open.clone()).expect_err("no key");
        assert!(matches!(error, ServeError::Open { .. }), "{error}");
        assert!(error.to_string().contains(host));
    }
    let error = Server::bind(ServeOptions { host: "no such host".into(), ..options() });
    assert!(matches!(error, Err(ServeError::Listen { .. })));
    for keys in [vec![String::new()], vec![" x".into()]] {
        assert!(matches!(
            Server::bind(ServeOptions { keys, ..options() }),
            Err(ServeError::Option { .. })
        ));
    }
    let wrong = ServeOptions { origins: vec!["example.org".into()], ..options() };
    assert!(matches!(Server::bind(wrong), Err(ServeError::Option { .. })));
    // A port that somebody has.
    let place = with(options());
    let taken = ServeOptions { port: place.address.port(), ..options() };
    assert!(matches!(Server::bind(taken), Err(ServeError::Listen { .. })));
}

#[test]
fn pages_of_other_sites_are_turned_away_unless_they_are_allowed() {
    let place = with(options());
    let other = ("origin", "https://evil.example");
    for (method, path) in
        [("POST", "/v1/completions"), ("GET", "/status"), ("OPTIONS", "/v1/completions")]
    {
        let response =
            ask(&place, method, path, &[other, ("access-control-request-method", "POST")]);
        assert_eq!(
            (response.status, response.header("access-control-allow-origin")),
            (403, None),
            "{method} {path}"
        );
    }
    assert_eq!(ask(&place, "POST", "/v1/completions", &[("origin", "null")]).status, 403);
    // The page itself is of this site.
    let own = ask(&place, "POST", "/v1/completions", &[("origin", "http://localhost")]);
    assert_eq!((own.status, own.header("access-control-allow-origin")), (200, None));
    // A name that leads here for a while only.
    let rebound = ask(&place, "GET", "/status", &[("host", "evil.example")]);
    assert_eq!(rebound.status, 403);
    for host in ["127.0.0.1", "[::1]:8080", "localhost:1"] {
        assert_eq!(ask(&place, "GET", "/status", &[("host", host)]).status, 200);
    }
}

#[test]
fn allowed_origins_may_read_answers() {
    let one = ServeOptions {
        origins: vec!["https://app.example".into()],
        keys: vec!["k".into()],
        ..options()
    };
    let place = with(one);
    let origin = ("origin", "https://app.example");
    let before = ask(
        &place,
        "OPTIONS",
        "/v1/completions",
        &[origin, ("access-control-request-method", "POST")],
    );
    assert_eq!(
        (before.status, before.header("access-control-allow-origin")),
        (204, Some("https://app.example"))
    );
    assert_eq!(before.header("access-control-allow-methods"), Some("GET, POST"));
    assert!(
        before
            .header("access-control-allow-headers")
            .is_some_and(|list| list.contains("authorization"))
    );
    let answer = ask(&place, "POST", "/v1/completions", &[origin, ("authorization", "Bearer k")]);
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (200, Some("https://app.example"))
    );
    assert_eq!(answer.header("vary"), Some("origin"));
    // Errors can be read as well, and the key is asked for.
    let denied = ask(&place, "POST", "/v1/completions", &[origin]);
    assert_eq!(
        (denied.status, denied.header("access-control-allow-origin")),
        (401, Some("https://app.example"))
    );
    assert_eq!(
        ask(&place, "POST", "/v1/completions", &[("origin", "https://other.example")]).status,
        403
    );
    let every = with(ServeOptions { origins: vec!["*".into()], ..options() });
    let answer = ask(&every, "POST", "/v1/completions", &[("origin", "https://any.example")]);
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some("*")));
}

fn file(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/http/tls").join(name)
}

fn tls() -> TlsFiles {
    TlsFiles { certificate: file("certificate.pem"), key: file("key.pem") }
}

/// A client that trusts the test's certificate alone.
fn secure(address: std::net::SocketAddr) -> Connection<impl Read + Write> {
    let mut roots = RootCertStore::empty();
    let certificate =
        CertificateDer::from_pem_file(file("certificate.pem")).expect("a certificate");
    roots.add(certificate).expect("a root");
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    let session = ClientConnection::new(Arc::new(config), name).expect("a session");
    let stream = std::net::TcpStream::connect(address).expect("a connection");
    stream.set_read_timeout(Some(crate::client::PATIENCE)).expect("a timeout");
    Connection::over(StreamOwned::new(session, stream))
}

#[test]
fn tls_carries_answers_and_streams() {
    let place = with(ServeOptions { tls: Some(tls()), ..options() });
    assert!(place.url.starts_with("https://127.0.0.1:"), "{}", place.url);
    until(|| {
        let mut connection = secure(place.address);
        connection.ask("GET", "/health", &[], b"");
        connection.response().is_some_and(|response| response.status == 200)
    });
    let mut connection = secure(place.address);
    for _ in 0..2 {
        connection.ask(
            "POST",
            "/v1/completions",
            &[],
            json!({ "prompt": "x", "stream": true }).to_string().as_bytes(),
        );
        let chunks = connection.response().expect("an answer").chunks();
        let text: String =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, "hello");
    }
    // Whoever does not speak TLS gets nothing, and does not disturb.
    let mut plain = connect(place.address);
    plain.ask("GET", "/health", &[], b"");
    let mut answer = Vec::new();
    let _ = plain.stream().read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    connection.ask("GET", "/health", &[], b"");
    assert_eq!(connection.response().expect("an answer").status, 200);
}

#[test]
fn files_of_tls_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let empty = folder.path().join("empty.pem");
    std::fs::write(&empty, "").expect("a file");
    for (certificate, key, named) in [
        (file("none.pem"), file("key.pem"), "none.pem"),
        (file("certificate.pem"), file("none.pem"), "none.pem"),
        (empty.clone(), file("key.pem"), "empty.pem"),
        (file("certificate.pem"), empty.clone(), "empty.pem"),
        (file("key.pem"), file("certificate.pem"), "key.pem"),
    ] {
        let tls = Some(TlsFiles { certificate, key });
        let error =
            Server::bind(ServeOptions { tls, ..options() }).expect_err("no TLS").to_string();
        assert!(error.contains(named), "{error}");
    }
}
