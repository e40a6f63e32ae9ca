// SPDX-License-Identifier: Apache-2.0
//! What answers requests: the engine's service, or in tests a script. The edge knows no more of the model's side than
//! this.

use std::sync::Arc;

use spanker_engine::{Ask, Delivery, Model, Refusal, Service, ServiceOptions, Status, Taken};

/// What answers requests.
pub trait Backend: Send + Sync {
    /// The model.
    fn model(&self) -> &Arc<Model>;

    /// How it runs.
    fn options(&self) -> &ServiceOptions;

    /// Takes a request: see [`Service::submit`].
    ///
    /// # Errors
    /// [`Refusal`], after which `deliver` is never called.
    fn submit(&self, ask: Ask, deliver: Delivery) -> Result<Taken, Refusal>;

    /// What it is doing.
    fn status(&self) -> Status;

    /// Takes no more requests; those that were taken go on.
    fn drain(&self);
}

impl Backend for Service {
    fn model(&self) -> &Arc<Model> {
        Service::model(self)
    }

    fn options(&self) -> &ServiceOptions {
        Service::options(self)
    }

    fn submit(&self, ask: Ask, deliver: Delivery) -> Result<Taken, Refusal> {
        Service::submit(self, ask, deliver)
    }

    fn status(&self) -> Status {
        Service::status(self)
    }

    fn drain(&self) {
        Service::drain(self);
    }
}
