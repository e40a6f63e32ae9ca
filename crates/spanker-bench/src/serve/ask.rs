// SPDX-License-Identifier: Apache-2.0
//! One client: its connection, what it asks, and when pieces of the answer come.

use std::time::Instant;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::LoadTarget;

/// More than an event of a stream has.
const MOST_EVENT: usize = 1 << 20;

/// An answer that is complete.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// When each piece of text came.
    pub(super) times: Vec<Instant>,
    /// Its tokens, by the server's count.
    pub(super) tokens: usize,
    /// Tokens of the prompt that were there already, by the server's count.
    pub(super) cached: Option<usize>,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Refused {
    /// Too many wait.
    Full,
    /// Anything else, in words.
    Failed(String),
}

fn failed(what: impl ToString) -> Refused {
    Refused::Failed(what.to_string())
}

/// A client's connection, opened when it is needed.
pub(super) struct Connection {
    target: LoadTarget,
    sender: Option<SendRequest<Full<Bytes>>>,
}

impl Connection {
    pub(super) fn new(target: LoadTarget) -> Connection {
        Connection { target, sender: None }
    }

    /// Asks for an answer of so many tokens, and reads it as it comes.
    pub(super) async fn ask(&mut self, prompt: &[u32], tokens: usize) -> Result<Answer, Refused> {
        let timeout = self.target.timeout;
        let outcome = tokio::time::timeout(timeout, self.exchange(prompt, tokens)).await;
        let outcome =
            outcome.unwrap_or_else(|_| Err(failed(format!("no answer within {timeout:?}"))));
        // What is left of an answer would be taken for the next one.
        if outcome.is_err() {
            self.sender = None;
        }
        outcome
    }

    async fn exchange(&mut self, prompt: &[u32], tokens: usize) -> Result<Answer, Refused> {
        let mut body = json!({
            "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "stream": true,
            "stream_options": {"include_usage": true},
        });
        if let Some(model) = &self.target.model {
            body["model"] = json!(model);
        }
        let request = self.request(body.to_string().into())?;
        let is_kept = self.sender.as_ref().is_some_and(|sender| !sender.is_closed());
        let response = match self.send(request.clone()).await? {
            // A server may close a connection that it kept just when it is asked again.
            Err(error) if is_kept && (error.is_incomplete_message() || error.is_canceled()) => {
                self.sender = None;
                self.send(request).await?
            }
            other => other,
        };
        let response = response.map_err(failed)?;
        match response.status() {
            StatusCode::OK => read(response).await,
            StatusCode::TOO_MANY_REQUESTS => Err(Refused::Full),
            status => {
                let body = response.into_body().collect().await.map_err(failed)?.to_bytes();
                let text = String::from_utf8_lossy(&body);
                Err(failed(format!("{status}: {}", text.chars().take(200).collect::<String>())))
            }
        }
    }

    fn request(&self, body: Bytes) -> Result<Request<Full<Bytes>>, Refused> {
        let mut request = Request::post("/v1/completions")
            .header("host", self.target.address.to_string())
            .header("content-type", "application/json");
        if let Some(key) = &self.target.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        request.body(Full::new(body)).map_err(failed)
    }

    async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<hyper::Result<Response<Incoming>>, Refused> {
        let sender = self.connected().await?;
        Ok(match sender.ready().await {
            Ok(()) => sender.send_request(request).await,
            Err(error) => Err(error),
        })
    }

    async fn connected(&mut self) -> Result<&mut SendRequest<Full<Bytes>>, Refused> {
        let is_open = self.sender.as_ref().is_some_and(|sender| !sender.is_closed());
        if !is_open {
            let stream = TcpStream::connect(self.target.address).await.map_err(failed)?;
            stream.set_nodelay(true).map_err(failed)?;
            let (sender, connection) =
                http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
            // What ends it is seen by whoever sends.
            tokio::spawn(async move { drop(connection.await) });
            self.sender = Some(sender);
        }
        self.sender.as_mut().ok_or_else(|| failed("no connection"))
    }
}

/// Reads a stream to its end.
async fn read(response: Response<Incoming>) -> Result<Answer, Refused> {
    let (mut answer, mut left) = (Answer::default(), Vec::new());
    let (mut body, mut is_done) = (response.into_body(), false);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(failed)?.into_data() else { continue };
        let now = Instant::now();
        left.extend_from_slice(&data);
        let mut begin = 0;
        while let Some(length) = left[begin..].iter().position(|&byte| byte == b'\n') {
            let line = &left[begin..begin + length];
            is_done |= answer.hear(line, now)?;
            begin += length + 1;
        }
        left.drain(..begin);
        if left.len() > MOST_EVENT {
            return Err(failed("an event without an end"));
        }
    }
    match is_done {
        true => Ok(answer),
        false => Err(failed("the stream ended before the answer did")),
    }
}

impl Answer {
    /// Takes a line of the stream; true for the last one.
    fn hear(&mut self, line: &[u8], now: Instant) -> Result<bool, Refused> {
        let Some(data) = line.strip_prefix(b"data:") else { return Ok(false) };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            return Ok(true);
        }
        let event: Value = serde_json::from_slice(data).map_err(failed)?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            return Err(failed(error));
        }
        let text = event["choices"][0]["text"].as_str();
        if text.is_some_and(|text| !text.is_empty()) {
            self.times.push(now);
        }
        let usage = &event["usage"];
        if let Some(tokens) = usage["completion_tokens"].as_u64() {
            self.tokens = tokens as usize;
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
            self.cached = cached.map(|tokens| tokens as usize);
        }
        Ok(false)
    }
}
