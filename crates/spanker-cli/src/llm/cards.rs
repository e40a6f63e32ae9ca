// SPDX-License-Identifier: Apache-2.0
//! A model on the cards that are there, and on those that are left when one is lost.

use std::path::PathBuf;
use std::time::Duration;

use std::sync::Arc;

use spanker_llm::{
    AuditLog, InProcess, LlmError, MemoryUse, OnCards, Outcome, Recorder, Runner, Session, Twice,
    Want,
};
use spanker_plan::{Layout, Plan, Request};
use spanker_runtime::SpankerControl;
use spanker_scheduler::{Deadline, DeviceErrorKind, Topology};
use spanker_topology::Cluster;

use super::compared::Piece;
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

    /// The model on these cards, as far audited as the plan asks for.
    pub(crate) fn runner<'a>(
        &'a self,
        left: &[usize],
        loaded: &Loaded,
        plan: &Plan,
        recorder: Option<&Recorder>,
        log: &AuditLog,
    ) -> Result<(Box<dyn Runner + 'a>, Vec<MemoryUse>), LlmError> {
        let mut runner = self.load_on(left, loaded, plan)?;
        let memory = runner.memory()?;
        if let Some(recorder) = recorder {
            runner.record(recorder)?;
        }
        if plan.request.audit > 0.0 {
            runner.audit(&loaded.network, log);
        }
        if plan.request.audit < 1.0 {
            return Ok((Box::new(runner), memory));
        }
        let (network, context, batch) = (Arc::clone(&loaded.network), loaded.context, loaded.batch);
        let host = InProcess::new(network, plan, context, batch, loaded.threads)?;
        Ok((Box::new(Twice::new(runner, Box::new(host))), memory))
    }

    /// The cards of `left` that can go on after an error, if it was a card's or a link's fault: those that
    /// answer and reach each other.
    pub(crate) fn survivors(&self, error: &LlmError, left: &[usize]) -> Option<Vec<usize>> {
        let error = match error {
            LlmError::Device(error) => error,
            // No card by itself is wrong: everything is brought onto them anew.
            LlmError::Unsure { .. } => return Some(left.to_vec()),
            _ => return None,
        };
        let mut well: Vec<usize> = match error.kind() {
            DeviceErrorKind::LinkDown | DeviceErrorKind::Unreachable => left.to_vec(),
            DeviceErrorKind::Lost
            | DeviceErrorKind::Stuck
            | DeviceErrorKind::Slow
            | DeviceErrorKind::Wrong => {
                let lost = error.card()?;
                left.iter().copied().filter(|&index| index != lost).collect()
            }
            _ => return None,
        };
        // Others may be gone as well, or apart. Every turn leaves fewer.
        while !well.is_empty() {
            let before = well.len();
            let alive = directory::alive(&self.folder);
            well.retain(|index| alive.contains(index));
            let Ok(cards) = directory::open(&self.folder, &well) else { return None };
            match cards.group() {
                Ok(_) if well.len() == before => return Some(well),
                Ok(_) => {}
                Err(error) => {
                    well = cards.survivors(&error);
                    if well.len() >= before {
                        return None;
                    }
                }
            }
        }
        None
    }

    /// Whether one of these does not answer any more.
    fn lack_one(&self, left: &[usize]) -> bool {
        let alive = directory::alive(&self.folder);
        left.iter().any(|index| !alive.contains(index))
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
    /// The layouts that the run has been on, the present one last.
    pub(crate) pieces: Vec<Piece>,
    /// What each card was planned to allocate, and what it has.
    pub(crate) memory: Vec<MemoryUse>,
    /// What was checked of what they computed.
    pub(crate) log: AuditLog,
}

impl Ongoing<'_> {
    /// The piece that begins with these tokens on the cards that are left.
    fn piece(&self, tokens: &[u32]) -> Piece {
        let number = |index: &usize| {
            let at = self.cards.indices.iter().position(|known| known == index);
            at.map_or(u32::MAX, |at| at as u32)
        };
        let before = self.pieces.last().and_then(|piece| piece.recorder.as_ref());
        Piece {
            plan: self.plan.clone(),
            tokens: tokens.to_vec(),
            recorder: before.map(Recorder::successor),
            cards: self.left.iter().map(number).collect(),
            recovery: Duration::ZERO,
        }
    }
}

impl<'r> Mend<'r> for Ongoing<'r> {
    /// Lays the model out over the cards that are left and computes everything again there. Shares and
    /// splits that were asked for were for the cards that there were.
    fn mend(
        &mut self,
        loaded: &Loaded,
        mut error: LlmError,
        session: &mut Session<'r>,
        want: Want,
    ) -> anyhow::Result<Outcome> {
        for _ in 0..=2 * self.cards.indices.len() {
            let Some(left) = self.cards.survivors(&error, &self.left) else {
                return Err(self.cards.told(error));
            };
            let begun = std::time::Instant::now();
            session.release();
            let list = directory::list(&left);
            eprintln!(
                "\n{error}: going on with card{} {list}",
                if left.len() == 1 { "" } else { "s" }
            );
            self.lost += self.left.len() - left.len();
            self.left = left;
            let planned = self.cards.plan_for(&self.left, loaded, self.plan.request.clone());
            self.plan = match planned {
                Ok(plan) => plan,
                // Another card was lost while the plan was made.
                Err(_) if self.cards.lack_one(&self.left) => continue,
                Err(error) => return Err(error),
            };
            let mut piece = self.piece(session.tokens());
            let (recorder, log) = (piece.recorder.as_ref(), &self.log);
            let mended = self.cards.runner(&self.left, loaded, &self.plan, recorder, log).and_then(
                |(runner, memory)| {
                    self.memory = memory;
                    piece.recovery = begun.elapsed();
                    self.pieces.push(piece);
                    session.go_on(runner, want)
                },
            );
            match mended {
                Ok(outcome) => {
                    let (tokens, time) = (session.tokens().len(), begun.elapsed().as_secs_f64());
                    eprintln!(
                        "{} again after {time:.2} s, with {tokens} tokens computed anew",
                        self.plan.layout.strategy()
                    );
                    return Ok(outcome);
                }
                Err(again) => error = again,
            }
        }
        Err(self.cards.told(error))
    }

    fn audit(&self) -> Option<AuditLog> {
        (self.plan.request.audit > 0.0).then(|| self.log.clone())
    }
}
