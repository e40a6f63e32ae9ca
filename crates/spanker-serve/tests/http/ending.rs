// SPDX-License-Identifier: Apache-2.0
//! The beginning and the end: what is said before there is a model, and how a server ends.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;
use spanker_engine::{Ask, FinishReason, Model, Update};
use spanker_serve::{Backend, ServeError, ServeOptions, Server};

use crate::client::{connect, get, post};
use crate::place::{Place, model, options, service_options, until};
use crate::script::{Script, done, endless, piece, says};

const TEXT: &str = "/v1/completions";

#[test]
fn server_listens_before_its_model_is_there_and_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model(folder.path(), None);
    let server = Server::bind(options()).expect("a server");
    let (address, handle) = (server.address(), server.handle());
    let (sender, receiver) = channel::<()>();
    let running = std::thread::spawn(move || {
        server.run(move || {
            receiver.recv().expect("a sign");
            Ok::<Arc<dyn Backend>, ServeError>(Arc::new(Script::new(
                model,
                service_options(),
                says("hello"),
            )))
        })
    });
    for response in [
        get(address, "/health"),
        post(address, TEXT, &json!({ "prompt": "x" })),
        post(address, "/tokenize", &json!({ "content": "x" })),
        get(address, "/props"),
    ] {
        assert_eq!((response.status, &response.json()["error"]["code"]), (503, &json!("loading")));
        assert_eq!(response.header("retry-after"), Some("1"));
    }
    // What can be said already is said.
    assert_eq!(get(address, "/v1/models").ok()["data"][0]["meta"], json!(null));
    assert_eq!(get(address, "/status").ok()["state"], "loading");
    assert_eq!(get(address, "/").status, 200);
    get(address, "/openapi.json").ok();
    assert!(get(address, "/metrics").text().contains("spanker_connections_total"));
    sender.send(()).expect("a loader");
    until(|| get(address, "/health").status == 200);
    post(address, TEXT, &json!({ "prompt": "x" })).ok();
    handle.end();
    running.join().expect("no panic").expect("an end in order");
}

#[test]
fn server_that_has_ended_gives_its_model_up_although_somebody_has_a_handle() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model(folder.path(), None);
    let server = Server::bind(options()).expect("a server");
    let (address, handle) = (server.address(), server.handle());
    let backend: Arc<dyn Backend> = Arc::new(Script::new(model, service_options(), says("hello")));
    let kept = Arc::downgrade(&backend);
    let running = std::thread::spawn(move || server.run(move || Ok::<_, ServeError>(backend)));
    until(|| get(address, "/health").status == 200);
    post(address, TEXT, &json!({ "prompt": "x" })).ok();
    handle.end();
    running.join().expect("no panic").expect("an end in order");
    assert!(kept.upgrade().is_none() && !handle.is_ready());
}

#[test]
fn model_that_cannot_be_loaded_ends_the_server_with_its_error() {
    let server = Server::bind(options()).expect("a server");
    let failed = server.run(|| Err(ServeError::Option { what: "no such model".into() }));
    assert_eq!(failed.expect_err("no model").to_string(), "no such model");
}

#[test]
fn server_that_ends_finishes_what_it_has_and_takes_nothing_more() {
    let (sender, receiver) = channel::<()>();
    let receiver = Mutex::new(receiver);
    let place =
        Place::scripted(move |_: &Model, ask: Ask, tell: &mut dyn FnMut(Update) -> bool| {
            tell(Update::Begun { cached_tokens: 0 });
            tell(piece(97, "a"));
            receiver.lock().expect("no panic").recv().expect("a sign");
            tell(piece(98, "b"));
            tell(done(ask.prompt.len(), 2, FinishReason::End));
        });
    let mut running = connect(place.address);
    running.ask("POST", TEXT, &[], json!({ "prompt": "x", "stream": true }).to_string().as_bytes());
    place.until(|place| place.status().running == 1);
    place.handle.end();
    for response in [place.get("/health"), place.post(TEXT, &json!({ "prompt": "x" }))] {
        assert_eq!((response.status, &response.json()["error"]["code"]), (503, &json!("ending")));
    }
    assert_eq!(place.get("/status").ok()["state"], "ending");
    let address = place.address;
    sender.send(()).expect("a voice");
    let response = running.response().expect("an answer");
    let text: String =
        response.chunks().iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "ab");
    place.end().expect("an end in order");
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn answers_that_take_too_long_are_stopped_in_the_end() {
    let brief = ServeOptions { drain: Duration::from_millis(300), ..options() };
    let place =
        Place::scripted_with(brief, None, service_options(), endless(Duration::from_millis(1)));
    let (mut whole, mut stream) = (connect(place.address), connect(place.address));
    whole.ask("POST", TEXT, &[], json!({ "prompt": "x" }).to_string().as_bytes());
    stream.ask("POST", TEXT, &[], json!({ "prompt": "x", "stream": true }).to_string().as_bytes());
    place.until(|place| place.status().running == 2);
    let begun = Instant::now();
    place.end().expect("an end in order");
    assert!(begun.elapsed() >= Duration::from_millis(300), "it did not wait");
    // What is told of an answer that is cut off is never that it is complete.
    let response = whole.response().expect("an answer");
    assert_eq!((response.status, &response.json()["error"]["code"]), (503, &json!("ending")));
    let text = String::from_utf8(stream.response().expect("an answer").body).expect("text");
    assert!(text.contains("\"ending\"") && !text.contains("[DONE]"));
}

#[test]
fn service_that_is_broken_says_so_and_is_not_well() {
    struct Broken(Script);
    impl Backend for Broken {
        fn model(&self) -> &Arc<Model> {
            self.0.model()
        }
        fn options(&self) -> &spanker_engine::ServiceOptions {
            self.0.options()
        }
        fn submit(
            &self,
            _: Ask,
            _: spanker_engine::Delivery,
        ) -> Result<spanker_engine::Taken, spanker_engine::Refusal> {
            Err(spanker_engine::Refusal::Broken("all cards are lost".into()))
        }
        fn status(&self) -> spanker_engine::Status {
            let mut status = self.0.status();
            status.broken = Some("all cards are lost".into());
            status
        }
        fn drain(&self) {
            self.0.drain();
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let model = model(folder.path(), None);
    let server = Server::bind(options()).expect("a server");
    let (address, handle) = (server.address(), server.handle());
    let running = std::thread::spawn(move || {
        let script = Script::new(model, service_options(), says("hello"));
        server.run(|| Ok::<Arc<dyn Backend>, ServeError>(Arc::new(Broken(script))))
    });
    until(|| get(address, "/status").ok()["state"] == "broken");
    for response in [get(address, "/health"), post(address, TEXT, &json!({ "prompt": "x" }))] {
        let error = response.json()["error"].clone();
        assert_eq!((response.status, &error["message"]), (503, &json!("all cards are lost")));
    }
    handle.end();
    running.join().expect("no panic").expect("an end in order");
}
