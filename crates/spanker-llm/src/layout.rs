// SPDX-License-Identifier: Apache-2.0
//! A plan as a network's runners need it: whether it can be run, what each card allocates, and the steps of one
//! sequence. What a layer is, `spanker-plan` says.

use spanker_model::Quant;
use spanker_plan::{
    Audit, Buffer, BufferId, CardLayout, Part, Piece, Place, Plan, Programs, Space, Stage, Want,
    card_layouts,
};
use spanker_topology::{ExchangeKind, Kernels};

use crate::runner::Step;
use crate::{LlmError, Network};

/// A plan for a network, and what its cards have room for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planned<'p> {
    plan: &'p Plan,
    pub(crate) space: Space,
    /// How the runner's cards exchange, whatever cards the plan was made for.
    kind: ExchangeKind,
    /// Where the runner's kernels are.
    kernels: Kernels,
}

impl<'p> Planned<'p> {
    /// A plan with room for one sequence.
    ///
    /// # Errors
    /// [`LlmError::Plan`] for a plan of another model or one that cannot be run.
    pub(crate) fn new<B: AsRef<[u8]>>(
        network: &Network<B>,
        plan: &'p Plan,
        context: usize,
        batch: usize,
        kind: ExchangeKind,
        kernels: Kernels,
    ) -> Result<Self, LlmError> {
        check_plan(network, plan)?;
        // Cards that exchange by schedules are behind the ABI, and have descriptors for taps.
        let audit = match kind {
            ExchangeKind::Schedules => plan.request.taps(),
            _ => Audit::NONE,
        };
        let space = Space { context: context as u64, batch: batch as u64, sequences: 1, audit };
        Ok(Planned { plan, space, kind, kernels })
    }

    pub(crate) fn stages(&self) -> &'p [Stage] {
        &self.plan.layout.replicas[0]
    }

    /// What every card holds and allocates.
    pub(crate) fn cards(&self) -> Vec<CardLayout> {
        let Plan { model, cluster, .. } = self.plan;
        let (kind, kernels) = (Some(self.kind), Some(self.kernels));
        card_layouts(model, cluster, self.stages(), self.space, kind, kernels)
    }

    /// Programs on what was allocated: `weight` says where a piece of a member's weights is, `buffer` which of
    /// its buffers is for what.
    pub(crate) fn programs<B: AsRef<[u8]>>(
        &self,
        network: &Network<B>,
        weight: &mut dyn FnMut(usize, &Piece) -> Place,
        buffer: &mut dyn FnMut(usize, Buffer) -> BufferId,
    ) -> Programs {
        let (model, cluster, numerics) = (network.model(), &self.plan.cluster, network.numerics());
        let (stages, space, kind) = (self.stages(), self.space, Some(self.kind));
        Programs::bound(model, cluster, stages, space, numerics, kind, weight, buffer)
    }
}

/// Whether a plan is one for this model that can be run.
///
/// # Errors
/// [`LlmError::Plan`] that says why not.
pub fn check_plan<B: AsRef<[u8]>>(network: &Network<B>, plan: &Plan) -> Result<(), LlmError> {
    let (ours, theirs) = (network.model(), &plan.model);
    let same = ours.layers == theirs.layers
        && ours.architecture == theirs.architecture
        && (ours.hidden, ours.heads, ours.kv_heads, ours.ffn, ours.vocab)
            == (theirs.hidden, theirs.heads, theirs.kv_heads, theirs.ffn, theirs.vocab)
        && (ours.biases, ours.head_norms, ours.rope_dims)
            == (theirs.biases, theirs.head_norms, theirs.rope_dims)
        && (ours.embedding, ours.head, ours.tied) == (theirs.embedding, theirs.head, theirs.tied);
    if !same {
        let what = format!("it is for another model: {} and not {}", theirs.name, ours.name);
        return Err(LlmError::plan(what));
    }
    if plan.layout.replicas.len() != 1 {
        let copies = plan.layout.replicas.len();
        return Err(LlmError::plan(format!("it has {copies} copies of the model, a run uses one")));
    }
    if plan.request.kv != Quant::F16 {
        let kv = plan.request.kv;
        return Err(LlmError::plan(format!("keys and values as {kv}: f16 can be run")));
    }
    Ok(())
}

/// Refuses a step that cannot be.
pub(crate) fn check(programs: &Programs, vocab: u64, step: &Step<'_>) -> Result<(), LlmError> {
    let space = programs.space();
    let (tokens, context) = (step.past + step.tokens.len(), space.context as usize);
    if tokens > context {
        return Err(LlmError::Context { tokens, context });
    }
    if let Some(&token) = step.tokens.iter().find(|&&token| u64::from(token) >= vocab) {
        return Err(LlmError::Token { token, vocab });
    }
    let part = part(step);
    let whole = spanker_plan::Step { parts: &[part] };
    programs.check(&whole).map_err(|error| match step.want {
        Want::Best(k) if !(1..=spanker_plan::MAX_CANDIDATES).contains(&u64::from(k)) => {
            LlmError::unsupported(error.to_string())
        }
        _ => LlmError::plan(error.to_string()),
    })
}

/// A step of the one sequence.
pub(crate) fn part<'s>(step: &Step<'s>) -> Part<'s> {
    Part { sequence: 0, tokens: step.tokens, past: step.past as u64, want: step.want }
}
