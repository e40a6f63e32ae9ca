// SPDX-License-Identifier: Apache-2.0
//! What all requests share: the model, once it is there, and whether the server is ending.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use serde_json::Value;
use spanker_engine::Model;
use tokio::sync::Semaphore;

use crate::answers::Slots;
use crate::backend::Backend;
use crate::body::Received;
use crate::error::{ApiError, Result};
use crate::grammar::Grammars;
use crate::head::now;
use crate::key::Keys;
use crate::metrics::Metrics;
use crate::options::ServeOptions;
use crate::request::Served;
use crate::tools::Abilities;

/// Schemas that become parsers at the same time: others wait, so that the threads that read requests stay free.
const SCHEMAS: usize = 2;

/// A model that answers.
pub(crate) struct Loaded {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) served: Served,
    pub(crate) grammars: Grammars,
    /// What its chat template has for tools.
    pub(crate) abilities: Abilities,
    pub(crate) template: String,
}

impl Loaded {
    /// Makes ready what requests need beside the model itself.
    fn new(backend: Arc<dyn Backend>, names: Vec<String>) -> Result<Loaded, String> {
        let model = backend.model();
        let (vocab, options) = (model.shape().vocab, backend.options());
        let room = (options.parallel + options.queue).max(1);
        let grammars = Grammars::new(model.tokenizer(), vocab as usize)?;
        // A template that cannot be read says so when it is used.
        let template = model.chat_template().unwrap_or_default();
        let abilities = Abilities::of(&template);
        let served = Served { names, vocab, room };
        Ok(Loaded { backend, served, grammars, abilities, template })
    }

    /// The model.
    pub(crate) fn model(&self) -> &Arc<Model> {
        self.backend.model()
    }

    /// What it is called.
    pub(crate) fn name(&self) -> &str {
        &self.served.names[0]
    }

    /// Tokens of a prompt and its answer, at most.
    pub(crate) fn context(&self) -> usize {
        self.backend.options().context
    }
}

/// Whether there is a model.
enum Stage {
    Loading,
    Ready(Arc<Loaded>),
}

/// What all requests share.
pub(crate) struct App {
    pub(crate) options: ServeOptions,
    pub(crate) keys: Keys,
    stage: RwLock<Stage>,
    is_ending: AtomicBool,
    pub(crate) slots: Arc<Slots>,
    pub(crate) metrics: Arc<Metrics>,
    /// When the server started, and in seconds since 1970.
    pub(crate) started: (Instant, u64),
    /// Connections that are open.
    pub(crate) connected: AtomicUsize,
    /// KiB of bodies that may be read now.
    pub(crate) bodies: Arc<Semaphore>,
    pub(crate) schemas: Semaphore,
}

impl App {
    pub(crate) fn new(options: ServeOptions) -> App {
        App {
            keys: Keys::new(&options.keys),
            stage: RwLock::new(Stage::Loading),
            is_ending: AtomicBool::new(false),
            slots: Arc::default(),
            metrics: Arc::default(),
            started: (Instant::now(), now()),
            connected: AtomicUsize::new(0),
            bodies: Arc::new(Semaphore::new(options.limits.bodies >> 10)),
            schemas: Semaphore::new(SCHEMAS),
            options,
        }
    }

    /// The names by which the model can be asked for.
    pub(crate) fn names(&self) -> Vec<String> {
        let ServeOptions { name, other_names, .. } = &self.options;
        std::iter::once(name).chain(other_names).cloned().collect()
    }

    /// The model is there.
    ///
    /// # Errors
    /// A sentence, for a model that no requests can be read for.
    pub(crate) fn load(&self, backend: Arc<dyn Backend>) -> Result<(), String> {
        let loaded = Arc::new(Loaded::new(backend, self.names())?);
        if self.is_ending() {
            loaded.backend.drain();
        }
        *self.stage.write().unwrap_or_else(PoisonError::into_inner) = Stage::Ready(loaded);
        Ok(())
    }

    /// Gives the model up, so that whoever runs it ends in order, also where somebody still has a handle of the server.
    pub(crate) fn unload(&self) {
        let mut stage = self.stage.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *stage, Stage::Loading);
        drop(stage);
        // It may take as long as a step.
        drop(before);
    }

    /// The model, if it is there.
    pub(crate) fn loaded(&self) -> Option<Arc<Loaded>> {
        match &*self.stage.read().unwrap_or_else(PoisonError::into_inner) {
            Stage::Loading => None,
            Stage::Ready(loaded) => Some(Arc::clone(loaded)),
        }
    }

    /// The model, for a request that needs it.
    ///
    /// # Errors
    /// Why there is none, or none any more.
    pub(crate) fn ready(&self) -> Result<Arc<Loaded>> {
        if self.is_ending() {
            return Err(ApiError::ending());
        }
        let loading = || ApiError::busy("loading", "the model is being loaded");
        let loaded = self.loaded().ok_or_else(loading)?;
        match loaded.backend.status().broken {
            Some(reason) => Err(ApiError::unavailable("broken", reason)),
            None => Ok(loaded),
        }
    }

    /// Whether no more requests are taken.
    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// Takes no more requests.
    pub(crate) fn end(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
        if let Some(loaded) = self.loaded() {
            loaded.backend.drain();
        }
    }

    /// Calls a function that takes a while on a thread that may.
    ///
    /// # Errors
    /// What the function fails with.
    pub(crate) async fn aside<T: Send + 'static>(
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|_| Err(ApiError::internal("the request could not be read")))
    }

    /// Reads a body as a request on a thread that may take a while.
    ///
    /// # Errors
    /// What `read` fails with, or why there is no model.
    pub(crate) async fn read<T: Send + 'static>(
        self: &Arc<App>,
        body: Received,
        read: impl FnOnce(&Loaded, Value) -> Result<T> + Send + 'static,
    ) -> Result<(Arc<Loaded>, T)> {
        let loaded = self.ready()?;
        let own = Arc::clone(&loaded);
        let read = App::aside(move || read(&own, crate::request::json(body.bytes())?)).await?;
        Ok((loaded, read))
    }
}
