// SPDX-License-Identifier: Apache-2.0
//! Bodies of requests: of a bounded size, in a bounded time, and not too many bytes of all of them at once.

use std::pin::Pin;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use hyper::HeaderMap;
use hyper::body::{Body as HttpBody, Bytes};
use hyper::header::CONTENT_TYPE;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::app::App;
use crate::error::{ApiError, Result};

/// Bytes of a body that need not wait for others.
const SMALL: usize = 64 << 10;
/// How long more than a body may have is read and dropped, so that its sender reads why.
const DRAIN: Duration = Duration::from_secs(10);
/// The same for a body that nobody wants.
const DISCARD: Duration = Duration::from_secs(1);

/// A body that was read.
#[derive(Debug)]
pub(crate) struct Received {
    bytes: Vec<u8>,
    /// Room among the bytes of all bodies.
    _room: Option<OwnedSemaphorePermit>,
}

impl Received {
    /// What is in it.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads what is left of a small body and drops it: whoever is still sending when the connection is closed may never
/// read why.
pub(crate) async fn discard(request: Request) {
    let mut body = request.into_body();
    let read = async {
        let mut left = SMALL;
        while let Ok(Some(data)) = frame(&mut body).await {
            left = left.saturating_sub(data.len());
            if left == 0 {
                break;
            }
        }
    };
    let _ = timeout(DISCARD, read).await;
}

/// The body of a request, which should be JSON.
///
/// # Errors
/// A body of another kind, too large, or too slow.
pub(crate) async fn receive(app: &App, request: Request) -> Result<Received> {
    if let Err(error) = check_kind(request.headers()) {
        discard(request).await;
        return Err(error);
    }
    let limits = &app.options.limits;
    let mut body = request.into_body();
    let read = read(&mut body, limits.body, &app.bodies);
    let slow = |_| ApiError::slow(format!("the body did not come within {:?}", limits.body_time));
    match timeout(limits.body_time, read).await.map_err(slow)? {
        Err(Wrong::Large) => {
            // Whoever is still sending does not read yet.
            let _ = timeout(DRAIN, async {
                while frame(&mut body).await.is_ok_and(|more| more.is_some()) {}
            })
            .await;
            Err(ApiError::large(limits.body))
        }
        Err(Wrong::Broken) => Err(ApiError::request("the body breaks off")),
        Ok(received) => Ok(received),
    }
}

/// Clients say that they send JSON, or nothing; curl says that it sends a form.
fn check_kind(headers: &HeaderMap) -> Result<()> {
    let Some(kind) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    let kind = String::from_utf8_lossy(kind.as_bytes()).to_ascii_lowercase();
    let name = kind.split(';').next().unwrap_or_default().trim();
    match name {
        "application/json" | "application/x-www-form-urlencoded" | "" => Ok(()),
        other => Err(ApiError::media(other)),
    }
}

enum Wrong {
    Large,
    Broken,
}

async fn frame(body: &mut Body) -> Result<Option<Bytes>, Wrong> {
    let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
    match frame {
        None => Ok(None),
        Some(Ok(frame)) => Ok(Some(frame.into_data().unwrap_or_default())),
        Some(Err(_)) => Err(Wrong::Broken),
    }
}

async fn read(body: &mut Body, most: usize, bodies: &Arc<Semaphore>) -> Result<Received, Wrong> {
    if body.size_hint().lower() > most as u64 {
        return Err(Wrong::Large);
    }
    let mut bytes = Vec::new();
    let mut room: Option<OwnedSemaphorePermit> = None;
    while let Some(data) = frame(body).await? {
        let length = bytes.len() + data.len();
        if length > most {
            return Err(Wrong::Large);
        }
        let has = room.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let needs = if length > SMALL { length.div_ceil(1 << 10) } else { 0 };
        if needs > has {
            let more = u32::try_from(needs - has).unwrap_or(u32::MAX);
            let permit = Arc::clone(bodies).acquire_many_owned(more).await;
            let permit = permit.map_err(|_| Wrong::Broken)?;
            match &mut room {
                Some(room) => room.merge(permit),
                None => room = Some(permit),
            }
        }
        bytes.extend_from_slice(&data);
    }
    Ok(Received { bytes, _room: room })
}
