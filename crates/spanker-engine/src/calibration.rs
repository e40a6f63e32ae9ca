// SPDX-License-Identifier: Apache-2.0
//! What cards on this processor take, measured in rounds that take turns with something else: so that a prediction and
//! what it is compared with meet the same neighbours.

use ggml_spanker::GgufFile;
use spanker_llm::{InProcess, Measurement, RankSamples};
use spanker_plan::Plan;

use crate::error::Result;
use crate::host::{Fabric, Host};
use crate::model::Model;
use crate::{profiles, threads};

/// A measurement on its way.
#[derive(Debug)]
pub struct Calibration {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Threads(Box<Measurement<InProcess<GgufFile>>>),
    Ranks(Box<Option<RankSamples>>),
    /// Cards with profiles of their own, and GPUs, whose clocks are steady.
    Steady,
}

impl Calibration {
    /// Of a plan's layout on a host.
    ///
    /// # Errors
    /// What laying the model out fails with.
    pub fn new(host: &Host, model: &Model, plan: &Plan) -> Result<Calibration> {
        let kind = match host.fabric() {
            Fabric::Inproc => {
                let batch = profiles::measured_batch(plan.request.batch as usize);
                let subject = threads::subject(&plan.layout, batch, host.thread_count());
                Kind::Threads(Box::new(Measurement::of_threads(model.network(), &subject)?))
            }
            Fabric::Mpi | Fabric::Tcp => Kind::Ranks(Box::default()),
            Fabric::Cards | Fabric::Cuda => Kind::Steady,
        };
        Ok(Calibration { kind })
    }

    /// Measures once more. On ranks no engine may be loaded meanwhile: they hold one layout at a time.
    ///
    /// # Errors
    /// What steps fail with.
    pub fn round(&mut self, host: &Host, model: &Model, plan: &Plan) -> Result<()> {
        match (&mut self.kind, host.backend().ranks()) {
            (Kind::Threads(measurement), _) => Ok(measurement.round(&mut |_| {})?),
            (Kind::Ranks(samples), Some(ranks)) => ranks.measure_more(model, plan, samples),
            _ => Ok(()),
        }
    }

    /// The plan with what is known by now.
    ///
    /// # Errors
    /// [`crate::EngineError::Plan`] if the plan does not go with that.
    pub fn priced(&self, host: &Host, plan: &Plan) -> Result<Plan> {
        let cluster = match (&self.kind, host.backend().ranks()) {
            (Kind::Threads(measurement), _) => {
                threads::uniform(measurement.profile(), &plan.layout)?
            }
            (Kind::Ranks(samples), Some(ranks)) => match &**samples {
                Some(samples) => {
                    ranks.cluster_of(samples.profiles(), &plan.layout, &host.indices())?
                }
                None => return Ok(plan.clone()),
            },
            _ => return Ok(plan.clone()),
        };
        let Plan { model, request, layout, .. } = plan;
        Ok(Plan::new(model.clone(), cluster, request.clone(), layout.clone())?)
    }
}
