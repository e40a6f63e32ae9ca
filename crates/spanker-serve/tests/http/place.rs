// SPDX-License-Identifier: Apache-2.0
//! Servers of tests: tiny models with random weights, and what answers for them.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ggml_spanker::synthetic::{self, Sizes};
use serde_json::Value;
use spanker_engine::{Host, Model, Service, ServiceOptions, Status, Wish};
use spanker_model::gguf::Field;
use spanker_model::{Quant, builtin};
use spanker_serve::{Backend, Handle, HttpLimits, ServeError, ServeOptions, Server};
use tempfile::TempDir;

use crate::client::{Response, get, post};
use crate::script::{Script, Voice};

/// The tokens of a test's context.
pub const CONTEXT: usize = 1024;

/// A model of random weights: a vocabulary of bytes, and three marks from 297 on.
pub fn model(folder: &Path, template: Option<&str>) -> Arc<Model> {
    let like = builtin("tinyllama-1.1b", Quant::Q8_0).expect("a shape");
    let sizes = Sizes {
        layers: Some(1),
        hidden: Some(64),
        heads: Some(2),
        kv_heads: Some(2),
        ffn: Some(64),
        vocab: Some(300),
        context: Some(2048),
        ..Sizes::default()
    };
    let (mut writer, _) = synthetic::like(&like, "llama", Quant::Q8_0, &sizes).expect("a model");
    if let Some(template) = template {
        writer.put("tokenizer.chat_template", Field::Text(template)).expect("a key");
    }
    let path = folder.join("tiny.gguf");
    let file = std::fs::File::create(&path).expect("a file");
    synthetic::write(&writer, file, 1, |_| Ok(())).expect("a file");
    Arc::new(Model::open(&path).expect("a model"))
}

pub fn service_options() -> ServiceOptions {
    ServiceOptions {
        parallel: 2,
        context: CONTEXT,
        batch: 64,
        kv_memory: None,
        kv: Quant::F16,
        queue: 6,
        wish: Wish::default(),
        audit: None,
        reuse: true,
        draft: spanker_engine::DraftSource::None,
    }
}

pub fn options() -> ServeOptions {
    ServeOptions {
        host: "127.0.0.1".into(),
        port: 0,
        keys: Vec::new(),
        origins: Vec::new(),
        tls: None,
        name: "tiny".into(),
        other_names: vec!["tiny.gguf".into()],
        drain: Duration::from_secs(5),
        limits: HttpLimits::usual(),
    }
}

/// A server with a model, for as long as it is there.
pub struct Place {
    pub address: SocketAddr,
    pub url: String,
    pub handle: Handle,
    backend: Arc<dyn Backend>,
    running: Option<JoinHandle<Result<(), ServeError>>>,
    _folder: TempDir,
}

impl Place {
    /// One where this backend answers.
    pub fn with(
        options: ServeOptions,
        template: Option<&str>,
        backend: impl FnOnce(Arc<Model>) -> Arc<dyn Backend>,
    ) -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        let model = model(folder.path(), template);
        let backend = backend(model);
        let server = Server::bind(options).expect("a server");
        let (address, url, handle) = (server.address(), server.url(), server.handle());
        let answering = Arc::clone(&backend);
        let running = std::thread::spawn(move || server.run(|| Ok::<_, ServeError>(answering)));
        let running = Some(running);
        let is_plain = url.starts_with("http:");
        let place = Place { address, url, handle, backend, running, _folder: folder };
        if is_plain {
            place.until(|place| place.get("/health").status == 200);
        }
        place
    }

    /// One where a voice answers.
    pub fn scripted(voice: impl Voice) -> Place {
        Place::scripted_with(options(), None, service_options(), voice)
    }

    pub fn scripted_with(
        options: ServeOptions,
        template: Option<&str>,
        service: ServiceOptions,
        voice: impl Voice,
    ) -> Place {
        Place::with(options, template, |model| Arc::new(Script::new(model, service, voice)))
    }

    /// One where the engine's service answers.
    pub fn real() -> Place {
        // Measuring this machine for a tiny model takes a while, and tests would disturb each other.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock();
        Place::with(options(), None, |model| {
            Arc::new(
                Service::start(model, service_options(), || Host::threads(1, 1))
                    .expect("a service"),
            )
        })
    }

    pub fn get(&self, path: &str) -> Response {
        get(self.address, path)
    }

    pub fn post(&self, path: &str, body: &Value) -> Response {
        post(self.address, path, body)
    }

    pub fn status(&self) -> Status {
        self.backend.status()
    }

    /// Waits until something is so.
    pub fn until(&self, mut is_so: impl FnMut(&Place) -> bool) {
        until(|| is_so(self));
    }

    /// Nothing is under way any more, neither here nor there.
    pub fn until_idle(&self) {
        self.until(|place| {
            let status = place.status();
            let slots = place.get("/slots").ok();
            let slots = slots.as_array().expect("slots").iter();
            let busy = slots.filter(|slot| slot["is_processing"] == true).count();
            status.running == 0 && status.waiting == 0 && busy == 0
        });
    }

    /// Ends the server in order and says what came of it.
    pub fn end(mut self) -> Result<(), ServeError> {
        self.handle.end();
        self.running.take().expect("a thread").join().expect("no panic")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.handle.end();
        if let Some(running) = self.running.take() {
            let ended = running.join();
            assert!(std::thread::panicking() || matches!(ended, Ok(Ok(()))), "{ended:?}");
        }
    }
}

/// Waits until something is so.
pub fn until(mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + crate::client::PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "it did not come to be");
        std::thread::sleep(Duration::from_millis(5));
    }
}
