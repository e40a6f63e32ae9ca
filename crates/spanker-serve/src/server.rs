// SPDX-License-Identifier: Apache-2.0
//! The server: it listens before the model is there, takes connections up to a bound, and ends in order.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::app::App;
use crate::backend::Backend;
use crate::error::ApiError;
use crate::options::{ServeError, ServeOptions};
use crate::{routes, tls};

/// Threads that requests are read and answers are written on.
const THREADS: usize = 2;
/// Threads that tokens and parsers are made on.
const ASIDE: usize = 6;
/// Bytes that the system keeps of what a client has not read.
const SEND_BUFFER: usize = 128 << 10;
/// Bytes of a request's head, and of what is written at a time.
const BUFFER: usize = 64 << 10;
/// How often a server that is ending looks whether everything has ended.
const LOOK: Duration = Duration::from_millis(20);
/// How long connections may take to end when nothing is under way on them.
const PARTING: Duration = Duration::from_secs(2);

/// A server that listens.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    app: Arc<App>,
    ending: Arc<Notify>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Ends a server from elsewhere.
#[derive(Clone)]
pub struct Handle {
    app: Arc<App>,
    ending: Arc<Notify>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

impl Handle {
    /// Whether the model is there, so that requests are answered.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.app.loaded().is_some()
    }

    /// Takes no more requests; answers that are under way go on for as long as [`ServeOptions::drain`] allows.
    pub fn end(&self) {
        self.app.end();
        self.ending.notify_one();
    }
}

impl Server {
    /// Listens at an address. Nothing is answered before [`Server::run`].
    ///
    /// # Errors
    /// [`ServeError`] for an address that nobody can listen at, one that others can reach without a key, options that
    /// make no sense, or files of TLS that cannot be used.
    pub fn bind(options: ServeOptions) -> Result<Server, ServeError> {
        check(&options)?;
        let (host, port) = (options.host.clone(), options.port);
        let failed = |error| ServeError::Listen { host: host.clone(), port, error };
        let addresses: Vec<SocketAddr> =
            (host.as_str(), port).to_socket_addrs().map_err(failed)?.collect();
        if options.keys.is_empty() && !addresses.iter().all(|address| address.ip().is_loopback()) {
            return Err(ServeError::Open { host });
        }
        let tls = options.tls.as_ref().map(tls::acceptor).transpose()?;
        let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        // Connections have what the listener has.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&listener, SEND_BUFFER);
        let address = listener.local_addr().map_err(failed)?;
        let (app, ending) = (Arc::new(App::new(options)), Arc::default());
        Ok(Server { listener, address, tls, app, ending })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where a browser on this machine finds its page.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let (mut address, ip) = (self.address, self.address.ip());
        if ip.is_unspecified() {
            address.set_ip(match ip {
                std::net::IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                std::net::IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        format!("{scheme}://{address}/")
    }

    /// What ends it from elsewhere.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle { app: Arc::clone(&self.app), ending: Arc::clone(&self.ending) }
    }

    /// Answers until it is ended. `load` is called on a thread of its own and gives the model; requests that come before
    /// are told to wait.
    ///
    /// # Errors
    /// What `load` fails with, or [`ServeError::System`].
    pub fn run<E: From<ServeError> + Send + 'static>(
        self,
        load: impl FnOnce() -> Result<Arc<dyn Backend>, E> + Send + 'static,
    ) -> Result<(), E> {
        let system = |doing| move |error| E::from(ServeError::System { doing, error });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(ASIDE)
            .thread_name("spanker-http")
            .enable_io()
            .enable_time()
            .build()
            .map_err(system("start threads"))?;
        let (report, failure) = oneshot::channel();
        let (app, own) = (Arc::clone(&self.app), Arc::clone(&self.app));
        let loading = move || {
            let loaded = load().and_then(|backend| {
                let wrong = |what| E::from(ServeError::Option { what });
                app.load(backend).map_err(wrong)
            });
            if let Err(error) = loaded {
                // A server that has ended does not hear it.
                let _ = report.send(error);
            }
        };
        let loader = std::thread::Builder::new().name("spanker-load".into()).spawn(loading);
        loader.map_err(system("start a thread"))?;
        let served = runtime.block_on(self.serve(failure));
        // What is left there has nobody to answer.
        runtime.shutdown_timeout(Duration::from_millis(200));
        own.unload();
        served
    }

    async fn serve<E: From<ServeError>>(self, failure: oneshot::Receiver<E>) -> Result<(), E> {
        let listener = tokio::net::TcpListener::from_std(self.listener);
        let listener =
            listener.map_err(|error| E::from(ServeError::System { doing: "listen", error }))?;
        let (parting, parted) = watch::channel(false);
        let router = routes::router(&self.app);
        let place = Place { app: Arc::clone(&self.app), router, tls: self.tls, parted };
        let accepting = tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => place.take(stream),
                    // Too many files are open: some will be closed.
                    Err(_) => sleep(LOOK).await,
                }
            }
        });
        let ended = self.ending.notified();
        let failed = async {
            match failure.await {
                Ok(error) => error,
                // The model is there.
                Err(_) => std::future::pending().await,
            }
        };
        let outcome = tokio::select! {
            () = ended => Ok(()),
            error = failed => Err(error),
        };
        if outcome.is_ok() {
            self.app.end();
            drain(&self.app).await;
        }
        accepting.abort();
        let _ = parting.send(true);
        let all_parted = async {
            while self.app.connected.load(Ordering::Relaxed) > 0 {
                sleep(LOOK).await;
            }
        };
        let _ = timeout(PARTING, all_parted).await;
        outcome
    }
}

/// Waits until nothing is under way, and stops what takes too long.
async fn drain(app: &App) {
    let end = Instant::now() + app.options.drain;
    while app.slots.count() > 0 {
        if Instant::now() >= end {
            app.slots.stop();
            let stopped = async {
                while app.slots.count() > 0 {
                    sleep(LOOK).await;
                }
            };
            let _ = timeout(PARTING, stopped).await;
            return;
        }
        sleep(LOOK).await;
    }
}

fn check(options: &ServeOptions) -> Result<(), ServeError> {
    let wrong = |what: String| Err(ServeError::Option { what });
    if let Some(key) = options.keys.iter().find(|key| key.trim().is_empty() || key.trim() != *key) {
        return wrong(format!("an API key of {} characters that are space", key.len()));
    }
    if options.name.is_empty() {
        return wrong("a model without a name".into());
    }
    match options.origins.iter().find(|origin| *origin != "*" && !is_origin(origin)) {
        Some(origin) => wrong(format!("'{origin}' is no origin such as https://example.org")),
        None => Ok(()),
    }
}

fn is_origin(text: &str) -> bool {
    let place = text.split_once("://").map(|(_, place)| place);
    place.is_some_and(|place| !place.is_empty() && !place.contains('/')) && text.is_ascii()
}

/// What connections have in common.
struct Place {
    app: Arc<App>,
    router: Router,
    tls: Option<TlsAcceptor>,
    /// Whether connections end when nothing is under way on them.
    parted: watch::Receiver<bool>,
}

/// A connection is open as long as this is there.
struct Open(Arc<App>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.connected.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Place {
    fn take(&self, stream: tokio::net::TcpStream) {
        let limits = self.app.options.limits;
        self.app.metrics.connections.fetch_add(1, Ordering::Relaxed);
        let open = self.app.connected.fetch_add(1, Ordering::Relaxed);
        let guard = Open(Arc::clone(&self.app));
        if open >= limits.connections {
            self.app.metrics.turned_away.fetch_add(1, Ordering::Relaxed);
            if self.tls.is_none() {
                turn_away(stream);
            }
            return;
        }
        // Tokens are small, and come one by one.
        let _ = stream.set_nodelay(true);
        let (router, parted, tls) = (self.router.clone(), self.parted.clone(), self.tls.clone());
        tokio::spawn(async move {
            let _guard = guard;
            match tls {
                None => converse(stream, router, parted, limits).await,
                Some(tls) => {
                    if let Ok(Ok(stream)) = timeout(limits.head, tls.accept(stream)).await {
                        converse(stream, router, parted, limits).await;
                    }
                }
            }
        });
    }
}

/// Says that there are too many connections, if that can be said at once.
fn turn_away(stream: tokio::net::TcpStream) {
    let body =
        ApiError::busy("connections", "there are too many connections").to_json().to_string();
    let length = body.len();
    let text = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
         retry-after: 1\r\nconnection: close\r\n\r\n{body}"
    );
    // Who does not hear it sees a connection that is closed.
    let _ = stream.into_std().and_then(|mut stream| stream.write_all(text.as_bytes()));
}

/// Answers the requests of a connection.
async fn converse<S>(
    stream: S,
    router: Router,
    mut parted: watch::Receiver<bool>,
    limits: crate::options::HttpLimits,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let io = TokioIo::new(crate::socket::Watched::new(stream, limits.unread));
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(BUFFER);
    let mut connection =
        std::pin::pin!(builder.serve_connection(io, TowerToHyperService::new(router)));
    tokio::select! {
        // Clients that go away are no news.
        _ = connection.as_mut() => return,
        _ = parted.wait_for(|parted| *parted) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_schemes_and_hosts() {
        for origin in ["https://example.org", "http://localhost:3000"] {
            assert!(is_origin(origin), "{origin}");
        }
        for origin in
            ["", "example.org", "https://", "https://example.org/", "https://ex\u{e9}.org"]
        {
            assert!(!is_origin(origin), "{origin}");
        }
    }
}
