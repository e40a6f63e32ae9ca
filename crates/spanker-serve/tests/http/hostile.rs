// SPDX-License-Identifier: Apache-2.0
//! Clients that send too much, too slowly or nothing, do not read, or go away: nobody else notices, and nothing of
//! them is left.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use spanker_engine::{Ask, FinishReason, Model, ServiceOptions, Update};
use spanker_serve::{HttpLimits, ServeOptions};

use crate::client::{Connection, connect};
use crate::place::{Place, options, service_options};
use crate::script::{done, endless, piece, says};

const TEXT: &str = "/v1/completions";

/// What everybody else gets meanwhile.
fn assert_others_are_answered(place: &Place) {
    place.post("/tokenize", &json!({ "content": "x" })).ok();
}

fn with_limits(change: impl FnOnce(&mut HttpLimits)) -> ServeOptions {
    let mut options = options();
    change(&mut options.limits);
    options
}

#[test]
fn body_of_a_hundred_megabytes_is_refused_and_its_sender_reads_why() {
    let place = Place::scripted(says("hello"));
    let mut connection = connect(place.address);
    let length = 100_000_000_usize;
    connection.ask("POST", TEXT, &[("content-length", &length.to_string())], b"{\"prompt\": \"");
    let block = vec![b'x'; 1 << 16];
    let mut left = length - 12;
    while left > 0 {
        let now = left.min(block.len());
        connection.send(&block[..now]);
        left -= now;
    }
    let response = connection.response().expect("an answer");
    assert_eq!(
        (response.status, &response.json()["error"]["type"]),
        (413, &json!("invalid_request_error"))
    );
    // The same without a length.
    let mut connection = connect(place.address);
    connection.ask("POST", TEXT, &[("content-length", ""), ("transfer-encoding", "chunked")], b"");
    drop(connection);
    let mut connection = connect(place.address);
    connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n");
    for _ in 0..200 {
        connection.send(b"10000\r\n");
        connection.send(&block);
        connection.send(b"\r\n");
    }
    connection.send(b"0\r\n\r\n");
    assert_eq!(connection.response().expect("an answer").status, 413);
    assert_others_are_answered(&place);
}

#[test]
fn heads_that_come_slowly_are_given_up() {
    let place = Place::scripted_with(
        with_limits(|limits| limits.head = Duration::from_millis(300)),
        None,
        service_options(),
        says("hello"),
    );
    let mut connection = connect(place.address);
    connection.send(b"GET /health HTTP/1.1\r\n");
    let mut lines = 0;
    while !connection.is_closed_after(Duration::from_millis(100)) {
        // A client that never ends its head.
        let _ = connection.stream().write_all(b"x-more: y\r\n");
        lines += 1;
        assert!(lines < 100, "it was never closed");
    }
    assert!(lines >= 2, "{lines}");
    // A connection on which nothing comes is closed as well.
    let mut idle = connect(place.address);
    assert!(idle.is_closed());
    place.until(|place| place.get("/metrics").text().contains("spanker_connections 1\n"));
}

#[test]
fn bodies_that_come_slowly_are_given_up() {
    let place = Place::scripted_with(
        with_limits(|limits| limits.body_time = Duration::from_millis(200)),
        None,
        service_options(),
        says("hello"),
    );
    let mut connection = connect(place.address);
    connection.ask("POST", TEXT, &[("content-length", "100")], b"{\"prompt\"");
    let response = connection.response().expect("an answer");
    assert_eq!(response.status, 408);
    assert_others_are_answered(&place);
}

#[test]
fn heads_that_are_too_large_or_no_http_are_refused() {
    let place = Place::scripted(says("hello"));
    for head in [
        format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(200_000)),
        format!(
            "GET / HTTP/1.1\r\n{}\r\n",
            (0..500).map(|at| format!("x{at}: y\r\n")).collect::<String>()
        ),
        "\u{16}\u{3}\u{1} hello\r\n\r\n".to_owned(),
        "GET / HTTP/9.9\r\n\r\n".to_owned(),
    ] {
        let mut connection = connect(place.address);
        // It may be closed before all of it was sent.
        let _ = connection.stream().write_all(head.as_bytes());
        let status = connection.head().map(|head| head.status);
        assert!(status.is_none_or(|status| [400, 431].contains(&status)), "{status:?}");
    }
    assert_others_are_answered(&place);
}

impl Connection<TcpStream> {
    /// Whether it was closed by then.
    fn is_closed_after(&mut self, wait: Duration) -> bool {
        self.stream().set_read_timeout(Some(wait)).expect("a timeout");
        let mut byte = [0];
        match self.stream().read(&mut byte) {
            Ok(0) => true,
            Ok(_) => false,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn client_that_never_reads_is_cancelled_and_nobody_waits_for_it() {
    let said = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&said);
    let place = Place::scripted_with(
        with_limits(|limits| limits.pieces = 64),
        None,
        service_options(),
        move |_: &Model, ask: Ask, tell: &mut dyn FnMut(Update) -> bool| {
            let mut heard = tell(Update::Begun { cached_tokens: 0 });
            while heard && !ask.limits.stop.is_stopped() {
                heard = tell(piece(97, "a"));
                // The model's thread is never held up: this loop goes on at its own speed.
                counted.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(20));
            }
        },
    );
    let mut connection = connect(place.address);
    connection.ask(
        "POST",
        TEXT,
        &[],
        json!({ "prompt": "x", "stream": true }).to_string().as_bytes(),
    );
    place.until(|place| place.status().cancelled == 1 && place.status().running == 0);
    assert_others_are_answered(&place);
    assert!(said.load(Ordering::Relaxed) > 64);
    place.until(|place| place.get("/metrics").text().contains("{outcome=\"unread\"} 1\n"));
    // Whoever reads after all is told, and not that it is complete.
    let mut text = String::new();
    assert_eq!(connection.head().map(|head| head.status), Some(200));
    while let Some(chunk) = connection.chunk() {
        text += std::str::from_utf8(&chunk).expect("text");
    }
    assert!(
        text.contains("\"unread\"") && !text.contains("[DONE]"),
        "{:?}",
        &text[text.len() - 300..]
    );
}

#[test]
fn client_that_reads_nothing_for_long_loses_its_connection() {
    let place = Place::scripted_with(
        with_limits(|limits| {
            (limits.unread, limits.pieces) = (Duration::from_millis(300), 1 << 20)
        }),
        None,
        service_options(),
        endless(Duration::ZERO),
    );
    let mut connection = connect(place.address);
    connection.ask(
        "POST",
        TEXT,
        &[],
        json!({ "prompt": "x", "stream": true }).to_string().as_bytes(),
    );
    place.until(|place| place.status().cancelled == 1 && place.status().running == 0);
    place.until(|place| place.get("/metrics").text().contains("spanker_connections 1\n"));
}

#[test]
fn client_that_goes_away_is_stopped_whether_it_streams_or_not() {
    let place = Place::scripted(endless(Duration::from_millis(1)));
    for (streams, half) in [(true, false), (false, false), (true, true), (false, true)] {
        let before = place.status().cancelled;
        let mut connection = connect(place.address);
        connection.ask(
            "POST",
            TEXT,
            &[],
            json!({ "prompt": "x", "stream": streams, "n": 2 }).to_string().as_bytes(),
        );
        place.until(|place| place.status().running == 2);
        place.until(|place| {
            place.get("/slots").ok()[1]["tokens"].as_u64().is_some_and(|count| count > 3)
        });
        match half {
            // One that has said all that it will say is as gone as one that does not listen.
            true => connection.stream().shutdown(Shutdown::Write).expect("a connection"),
            false => drop(connection),
        }
        place.until(|place| place.status().running == 0 && place.status().cancelled == before + 2);
    }
    place.until_idle();
}

#[test]
fn real_answers_of_clients_that_go_away_end_and_leave_nothing() {
    let place = Place::real();
    for streams in [true, false] {
        let mut connection = connect(place.address);
        let body = json!({ "prompt": "x", "stream": streams, "ignore_eos": true });
        connection.ask("POST", TEXT, &[], body.to_string().as_bytes());
        place.until(|place| place.status().running == 1 || place.status().answered > 0);
        drop(connection);
        place.until_idle();
    }
    place.post(TEXT, &json!({ "prompt": "x", "max_tokens": 2 })).ok();
}

#[test]
fn full_queue_is_429_with_the_time_to_wait() {
    let room = ServiceOptions { parallel: 1, queue: 2, ..service_options() };
    let place = Place::scripted_with(options(), None, room, endless(Duration::from_millis(1)));
    let mut clients: Vec<_> = (0..3).map(|_| connect(place.address)).collect();
    for client in &mut clients {
        client.ask(
            "POST",
            TEXT,
            &[],
            json!({ "prompt": "x", "stream": true }).to_string().as_bytes(),
        );
    }
    place.until(|place| place.status().running == 3);
    let response = place.post(TEXT, &json!({ "prompt": "x" }));
    assert_eq!((response.status, response.header("retry-after")), (429, Some("3")));
    assert_eq!(response.json()["error"]["code"], "rate_limit_exceeded");
    // What asks for more than there is room for at all makes no sense, and what is not taken leaves nothing.
    assert_eq!(place.post(TEXT, &json!({ "prompt": "x", "n": 4 })).status, 400);
    drop(clients.pop());
    place.until(|place| place.status().running == 2);
    assert_eq!(place.post(TEXT, &json!({ "prompt": "x", "n": 2 })).status, 429);
    place.until(|place| place.status().running == 2);
    drop(clients);
    place.until_idle();
    let metrics = place.get("/metrics");
    assert!(metrics.text().contains("{outcome=\"refused\"} 2\n"), "{}", metrics.text());
}

#[test]
fn connections_beyond_the_bound_are_told_so() {
    let place = Place::scripted_with(
        with_limits(|limits| limits.connections = 3),
        None,
        service_options(),
        says("hello"),
    );
    let mut held = Vec::new();
    place.until(|place| {
        // Connections of what was asked before may still be open.
        let mut connection = connect(place.address);
        connection.ask("GET", "/health", &[], b"");
        let taken = connection.response().is_some_and(|response| response.status == 200);
        held.extend(taken.then_some(connection));
        held.len() == 3
    });
    let mut turned_away = 0;
    for _ in 0..5 {
        let response = connect(place.address).response();
        turned_away += usize::from(response.is_some_and(|response| {
            assert_eq!(response.header("retry-after"), Some("1"));
            response.status == 503 && response.json()["error"]["code"] == "connections"
        }));
    }
    assert_eq!(turned_away, 5);
    drop(held);
    place.until(|place| {
        let mut connection = connect(place.address);
        connection.ask("GET", "/health", &[], b"");
        connection.response().is_some_and(|response| response.status == 200)
    });
}

#[test]
fn many_clients_at_once_get_their_own_answers() {
    let room = ServiceOptions { queue: 100, ..service_options() };
    let place = Place::scripted_with(
        options(),
        None,
        room,
        |model: &Model, ask: Ask, tell: &mut dyn FnMut(Update) -> bool| {
            tell(Update::Begun { cached_tokens: 0 });
            let text = model.tokenizer().decode(&ask.prompt);
            for letter in text.chars() {
                tell(piece(97, &letter.to_string()));
            }
            tell(done(ask.prompt.len(), text.len(), FinishReason::End));
        },
    );
    std::thread::scope(|scope| {
        for client in 0..24 {
            let place = &place;
            scope.spawn(move || {
                for turn in 0..6 {
                    let prompt = format!("client {client} turn {turn}");
                    let body = json!({ "prompt": prompt, "stream": turn % 2 == 0 });
                    let response = place.post(TEXT, &body);
                    let text: String = match turn % 2 {
                        0 => response
                            .chunks()
                            .iter()
                            .filter_map(|one| one["choices"][0]["text"].as_str())
                            .collect(),
                        _ => response.ok()["choices"][0]["text"].as_str().expect("text").to_owned(),
                    };
                    assert_eq!(text, prompt);
                }
            });
        }
    });
    place.until_idle();
    assert_eq!(place.status().answered, 144);
}

#[test]
fn requests_on_one_connection_are_answered_in_their_order() {
    let place = Place::scripted(says("hello"));
    let mut connection = connect(place.address);
    for _ in 0..3 {
        connection.ask("POST", "/tokenize", &[], b"{\"content\": \"a\"}");
        connection.ask("GET", "/health", &[], b"");
    }
    for _ in 0..3 {
        assert!(connection.response().expect("an answer").ok()["tokens"].is_array());
        assert_eq!(connection.response().expect("an answer").ok(), json!({ "status": "ok" }));
    }
    let _: Value = json!(null);
}
