// SPDX-License-Identifier: Apache-2.0
//! A model on the cards that are there, and on those that are left when one is lost.

use std::path::PathBuf;
use std::time::Duration;

use spanker_llm::{LlmError, OnCards, Outcome, Recorder, Session, Want};
use spanker_plan::{Layout, Plan, Request};
use spanker_runtime::SpankerControl;
use spanker_scheduler::{Deadline, DeviceError, Error, Topology};
use spanker_topology::Cluster;

use super::generate::Mend;
use super::{Loaded, Split, layout, loading};
use crate::directory::{self, CardList};
use crate::{fault, output};

/// How long a step may take in all, as waited by the host.
const TOTAL: Duration = Duration::from_secs(3600);

/// The cards of a run.
pub(crate) struct Cards {
    pub(crate) folder: PathBuf,
    pub(crate) topology: Topology<SpankerControl>,
    /// The devices' numbers.
    pub(crate) indices: Vec<usize>,
    pub(crate) deadline: Option<Duration>,
}

impl Cards {
    /// Opens the cards that a flag names.
    pub(crate) fn open(
        list: Option<&CardList>,
        deadline: Option<Duration>,
    ) -> anyhow::Result<Cards> {
        let folder = directory::find();
        let indices = directory::chosen(&folder, list)?;
        let topology = directory::open(&folder, &indices)?;
        Ok(Cards { folder, topology, indices, deadline })
    }

    /// The plan for all of them.
    pub(crate) fn plan(
        &self,
        loaded: &Loaded,
        request: Request,
        split: Option<Split>,
        shares: Option<&[f64]>,
    ) -> anyhow::Result<Plan> {
        let cluster = self.cluster(&self.indices)?;
        layout::plan(loaded.network.model(), cluster, request, split, shares)
    }

    /// The planner's best for these.
    pub(crate) fn plan_for(
        &self,
        left: &[usize],
        loaded: &Loaded,
        request: Request,
    ) -> anyhow::Result<Plan> {
        layout::plan(loaded.network.model(), self.cluster(left)?, request, None, None)
    }

    /// A layout on these.
    pub(crate) fn plan_as(
        &self,
        left: &[usize],
        loaded: &Loaded,
        request: Request,
        layout: Layout,
    ) -> anyhow::Result<Plan> {
        Ok(Plan::new(loaded.network.model().clone(), self.cluster(left)?, request, layout)?)
    }

    fn cluster(&self, indices: &[usize]) -> anyhow::Result<Cluster> {
        let cards = directory::open(&self.folder, indices)?;
        cards.cluster().map_err(|error| directory::blamed(&self.folder, indices, error))
    }

    /// Brings the model onto all cards.
    pub(crate) fn load<'a>(
        &'a self,
        loaded: &Loaded,
        plan: &Plan,
    ) -> Result<OnCards<'a>, LlmError> {
        self.load_on(&self.indices, loaded, plan)
    }

    /// Brings the model onto these cards, as a plan for them says.
    pub(crate) fn load_on<'a>(
        &'a self,
        left: &[usize],
        loaded: &Loaded,
        plan: &Plan,
    ) -> Result<OnCards<'a>, LlmError> {
        let card = |place: usize| -> Option<&'a SpankerControl> {
            let index = left.get(place)?;
            let at = self.topology.indices().iter().position(|known| known == index)?;
            self.topology.sails().get(at)
        };
        let (context, batch) = (loaded.context, loaded.batch);
        let runner = OnCards::load(&loaded.network, plan, context, batch, &card, &loading);
        output::progress_done();
        let mut runner = runner?;
        if let Some(detect) = self.deadline {
            runner.set_deadline(Deadline { detect, total: TOTAL, slow_after: None });
        }
        Ok(runner)
    }

    /// The cards of `left` that still reach each other after an error, if there are any and fewer than before.
    /// Links are looked at again, because those of cards that were lost earlier are gone, too.
    fn survivors(&self, error: &DeviceError, left: &[usize]) -> Option<Vec<usize>> {
        let lost = error.card()?;
        let mut well: Vec<usize> = left.iter().copied().filter(|&index| index != lost).collect();
        let cards = directory::open(&self.folder, &well).or_else(|_| {
            let alive = directory::alive(&self.folder);
            well.retain(|index| alive.contains(index));
            directory::open(&self.folder, &well)
        });
        let well = cards.ok()?.survivors(&Error::Device(error.clone()));
        Some(well).filter(|well| !well.is_empty() && well.len() < left.len())
    }

    /// An error with what it means for these cards.
    pub(crate) fn told(&self, error: LlmError) -> anyhow::Error {
        match error {
            LlmError::Device(error) => fault::told(&self.topology, error),
            other => other.into(),
        }
    }
}

/// Cards that a run goes on with, and the plan that it follows.
pub(crate) struct Ongoing<'r> {
    pub(crate) cards: &'r Cards,
    pub(crate) plan: Plan,
    /// The devices' numbers of those that are left.
    pub(crate) left: Vec<usize>,
    /// How many were lost.
    pub(crate) lost: usize,
    /// Where what cards do is recorded, if it is.
    pub(crate) recorder: Option<Recorder>,
}

impl<'r> Ongoing<'r> {
    /// Lays the model out over the cards that are left and computes everything again there.
    fn again(
        &mut self,
        loaded: &Loaded,
        session: &mut Session<'r>,
        want: Want,
    ) -> anyhow::Result<Outcome> {
        self.plan = self.cards.plan_for(&self.left, loaded, self.plan.request.clone())?;
        let mut runner = self.cards.load_on(&self.left, loaded, &self.plan)?;
        if let Some(recorder) = &self.recorder {
            runner.record(recorder)?;
        }
        Ok(session.go_on(Box::new(runner), want)?)
    }
}

impl<'r> Mend<'r> for Ongoing<'r> {
    /// Goes on with the cards that are left, until it works or none is. Shares and splits that were asked for
    /// were for the cards that there were.
    fn mend(
        &mut self,
        loaded: &Loaded,
        error: LlmError,
        session: &mut Session<'r>,
        want: Want,
    ) -> anyhow::Result<Outcome> {
        let LlmError::Device(mut device) = error else { return Err(self.cards.told(error)) };
        // A card that is lost while plans are made is not always a device's error.
        let mut last = anyhow::Error::from(LlmError::Device(device.clone()));
        loop {
            let Some(left) = self.cards.survivors(&device, &self.left) else {
                return Err(match last.downcast::<LlmError>() {
                    Ok(error) => self.cards.told(error),
                    Err(other) => other,
                });
            };
            session.release();
            let (list, s) = (directory::list(&left), if left.len() == 1 { "" } else { "s" });
            let story = last.to_string();
            let story = story.lines().next().unwrap_or_default();
            eprintln!("\n{story}: going on with card{s} {list}");
            self.lost += self.left.len() - left.len();
            self.left = left;
            match self.again(loaded, session, want) {
                Ok(outcome) => return Ok(outcome),
                Err(error) => last = error,
            }
            if let Some(LlmError::Device(again)) = last.downcast_ref() {
                device = again.clone();
            }
        }
    }
}
