// SPDX-License-Identifier: Apache-2.0
//! From answers under way to what a client gets: one JSON object, or events that end with `[DONE]`. What an event has
//! in it is for `chat` and `completion`.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use hyper::body::{Body as HttpBody, Bytes, Frame};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use serde_json::Value;
use spanker_engine::{Correction, FinishReason, Update};

use crate::answers::{Answers, Heard};
use crate::error::{ApiError, Result};

/// Bytes of events that are sent together, at most, if several are there.
const TOGETHER: usize = 16 << 10;
/// What ends a stream that is complete.
const DONE: &str = "data: [DONE]\n\n";

/// What becomes of updates.
pub(crate) trait Reply: Send + 'static {
    /// Takes an update of an answer and says what there is to be told of it. Answers that need not go on are named in
    /// `ended`.
    ///
    /// # Errors
    /// Why nothing can follow.
    fn hear(&mut self, at: usize, update: Update, ended: &mut Vec<usize>) -> Result<Vec<Value>>;

    /// What comes after all answers are complete.
    fn last(&mut self) -> Option<Value>;

    /// Everything at once.
    fn whole(&mut self) -> Value;
}

/// What a request gets: at once, or as it comes.
///
/// # Errors
/// Why there is no answer.
pub(crate) async fn reply(
    mut answers: Answers,
    mut reply: Box<dyn Reply>,
    stream: bool,
) -> Result<Response> {
    let mut ended = Vec::new();
    if !stream {
        while let Some(heard) = answers.next().await {
            let (at, update) = update_of(heard)?;
            reply.hear(at, update, &mut ended)?;
            ended.drain(..).for_each(|at| answers.stop(at));
        }
        return Ok(json_response(&reply.whole()));
    }
    // What goes wrong before anything was said is a status.
    let mut events = Vec::new();
    if let Some(heard) = answers.next().await {
        let (at, update) = update_of(heard)?;
        events = reply.hear(at, update, &mut ended)?;
    }
    let mut text = String::new();
    events.iter().for_each(|event| write_event(&mut text, event));
    let stream = Events { answers: Some(answers), reply, text };
    let mut response = Body::new(stream).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that gather what they pass on must not.
    let buffering = HeaderName::from_static("x-accel-buffering");
    headers.insert(buffering, HeaderValue::from_static("no"));
    Ok(response)
}

/// JSON as a response.
pub(crate) fn json_response(value: &Value) -> Response {
    let kind = HeaderValue::from_static("application/json");
    ([(CONTENT_TYPE, kind)], value.to_string()).into_response()
}

/// The finish reason of an answer, as clients know it.
///
/// # Errors
/// An answer that somebody stopped, who is not its client.
pub(crate) fn finish_reason(reason: FinishReason) -> Result<&'static str> {
    match reason {
        FinishReason::End | FinishReason::StopString => Ok("stop"),
        FinishReason::Length | FinishReason::Context => Ok("length"),
        _ => Err(ApiError::ending()),
    }
}

/// What is told of text that was given out and is wrong.
pub(crate) fn wrong_text(correction: &Correction) -> ApiError {
    let (token, blamed) = (correction.token + 1, &correction.blamed);
    let message = format!("token {token} and what follows it in this answer is wrong: {blamed}");
    ApiError::unavailable("corrected", message)
}

fn update_of(heard: Heard) -> Result<(usize, Update)> {
    match heard {
        Heard::Update(at, update) => Ok((at, update)),
        Heard::Unread => Err(ApiError::unavailable("unread", "the answer was not read in time")),
        Heard::Lost => Err(ApiError::unavailable("broken", "the model does not run any more")),
    }
}

fn write_event(text: &mut String, event: &Value) {
    text.push_str("data: ");
    text.push_str(&event.to_string());
    text.push_str("\n\n");
}

/// Events as they come, as a body.
struct Events {
    /// Nothing once the stream has ended.
    answers: Option<Answers>,
    reply: Box<dyn Reply>,
    /// What is to be sent next.
    text: String,
}

impl Events {
    /// Gathers what is there. Says whether there may be more.
    fn gather(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while let Some(answers) = &mut self.answers {
            if self.text.len() >= TOGETHER {
                return Poll::Ready(());
            }
            let heard = match answers.poll(context) {
                Poll::Ready(heard) => heard,
                Poll::Pending if self.text.is_empty() => return Poll::Pending,
                Poll::Pending => return Poll::Ready(()),
            };
            let Some(heard) = heard else {
                if let Some(event) = self.reply.last() {
                    write_event(&mut self.text, &event);
                }
                self.text.push_str(DONE);
                self.answers = None;
                return Poll::Ready(());
            };
            let mut ended = Vec::new();
            let events =
                update_of(heard).and_then(|(at, update)| self.reply.hear(at, update, &mut ended));
            match events {
                Ok(events) => {
                    events.iter().for_each(|event| write_event(&mut self.text, event));
                    ended.into_iter().for_each(|at| answers.stop(at));
                }
                // The status was sent long ago: the stream ends without its end.
                Err(error) => {
                    write_event(&mut self.text, &error.to_json());
                    self.answers = None;
                }
            }
        }
        Poll::Ready(())
    }
}

impl HttpBody for Events {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.gather(context).is_pending() {
            return Poll::Pending;
        }
        let text = std::mem::take(&mut self.text);
        Poll::Ready((!text.is_empty()).then(|| Ok(Frame::data(Bytes::from(text)))))
    }
}
