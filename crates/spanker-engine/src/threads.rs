// SPDX-License-Identifier: Apache-2.0
//! Cards that are threads of this process.

use std::sync::Arc;

use ggml_spanker::GgufFile;
use spanker_llm::{InProcess, LlmError, Subject, measure};
use spanker_plan::{Layout, Plan, Request};
use spanker_topology::{Bytes, Cluster, Profile, Shape};

use crate::error::{EngineError, Result};
use crate::host::{Backend, Fabric, Load, Loaded, Watch};
use crate::model::Model;
use crate::profiles::{self, Freshness};

/// Cards that are threads, and how many threads they share.
pub(crate) struct Threads {
    threads: usize,
    cards: usize,
}

impl Threads {
    pub(crate) fn new(threads: usize, cards: usize) -> Threads {
        Threads { threads, cards }
    }
}

/// The model on threads, as a plan says.
pub(crate) fn on_threads(
    model: &Model,
    plan: &Plan,
    threads: usize,
) -> Result<InProcess<GgufFile>, LlmError> {
    let (context, batch) = (plan.request.context as usize, plan.request.batch as usize);
    InProcess::new(Arc::clone(model.network()), plan, context, batch, threads)
}

/// What is measured of a layout on so many threads.
pub(crate) fn subject(layout: &Layout, batch: usize, threads: usize) -> Subject<'_> {
    Subject { layout, batch, threads, memory: Bytes(crate::memory::of_machine()) }
}

/// Equal cards that all reach each other, as many as a layout numbers.
pub(crate) fn uniform(profile: Profile, layout: &Layout) -> Result<Cluster> {
    let cards = layout.cards().last().map_or(1, |card| card + 1);
    Cluster::uniform(profile, cards, Shape::Switch).map_err(|error| EngineError::cluster(&error))
}

impl Backend for Threads {
    fn fabric(&self) -> Fabric {
        Fabric::Inproc
    }

    fn indices(&self) -> Vec<usize> {
        (0..self.cards).collect()
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn cluster(
        &self,
        model: &Model,
        request: &Request,
        layout: &Layout,
        freshness: Freshness,
        observer: &Watch,
    ) -> Result<Cluster> {
        if freshness == Freshness::Assumed {
            return uniform(profiles::assumed(layout)?, layout);
        }
        let batch = profiles::measured_batch(request.batch as usize);
        let key = profiles::threads_key(model.shape(), layout, batch, self.threads);
        let subject = subject(layout, batch, self.threads);
        let mut profiles = profiles::kept(vec![key], freshness, observer, &mut |progress| {
            Ok(vec![measure(model.network(), &subject, progress)?])
        })?;
        uniform(profiles.remove(0), layout)
    }

    fn measures_layouts(&self) -> bool {
        true
    }

    fn load<'h>(&'h self, _: &[usize], load: &Load<'_>) -> Result<Loaded<'h>, LlmError> {
        let mut runner = on_threads(load.model, load.plan, self.threads)?;
        let memory = runner.memory().to_vec();
        if let Some(recorder) = load.recorder {
            runner.record(recorder);
        }
        Ok(Loaded { runner: Box::new(runner), memory })
    }
}
