// SPDX-License-Identifier: Apache-2.0
//! A plan as a network's runners need it: whether it can be run, what each card allocates, and whether a step can be. What a layer is, `spanker-plan` says.

use spanker_model::{KvShape, Layer, Matrix, Mixture, Model, Number, Variant};
use spanker_plan::{
    Audit, Buffer, BufferId, CardLayout, Placing, Plan, Programs, Request, Space, Stage, Step,
    card_layouts,
};
use spanker_topology::{ExchangeKind, Kernels};

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
    /// A plan with room for what its request asks for, in sequences of so many tokens and steps of so many rows.
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
        let Request { sequences, kv, blocks, .. } = plan.request;
        let (context, audit) = (context as u64, Audit::NONE);
        let batch = (batch as u64).max(sequences);
        let blocks = blocks.unwrap_or_else(|| sequences * KvShape::blocks_for(context));
        // As the planner has it.
        let turns = spanker_plan::steps_under_way(&plan.request, plan.layout.pipeline_stages());
        let outputs = plan.request.outputs_for(sequences);
        let space = Space { context, batch, sequences, outputs, turns, blocks, kv, audit };
        Ok(Planned { plan, space, kind, kernels })
    }

    /// The same with the taps that the plan's request asks for: cards keep what operators read and wrote.
    pub(crate) fn tapped(mut self) -> Self {
        self.space.audit = self.plan.request.taps();
        self
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

    /// Programs on what was allocated: `weight` says where a piece of a member's weights is, and whether rows stay where
    /// the file has them, `buffer` which of its buffers is for what.
    pub(crate) fn programs<B: AsRef<[u8]>>(
        &self,
        network: &Network<B>,
        weight: Placing<'_>,
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
    if let Some(what) = difference(&plan.model, network.model()) {
        return Err(LlmError::plan(what));
    }
    if plan.layout.replicas.len() != 1 {
        let copies = plan.layout.replicas.len();
        return Err(LlmError::plan(format!("it has {copies} copies of the model, a run uses one")));
    }
    Ok(())
}

/// The first thing that a run depends on and in which the model of a plan and that of a file differ, with both values.
fn difference(plan: &Model, file: &Model) -> Option<String> {
    // All fields by name, so that a new one is compared or left out on purpose. Names, sources and the context of the
    // training change nothing in a run.
    let Model {
        name,
        source: _,
        context: _,
        architecture,
        hidden,
        heads,
        kv_heads,
        head_size,
        ffn,
        vocab,
        layers,
        embedding,
        head,
        tied,
        biases,
        head_norms,
        rope_dims,
        other_bytes: _,
        mixture,
        variant,
    } = plan;
    let differs = |what: &str, planned: &dyn ToString, has: &dyn ToString| {
        let (planned, has) = (planned.to_string(), has.to_string());
        let text = format!("made for {name} with {what} {planned}, the file has {has}");
        (planned != has).then_some(text)
    };
    let sizes: [(&str, &dyn ToString, &dyn ToString); 12] = [
        ("architecture", architecture, &file.architecture),
        ("layers", &layers.len(), &file.layers.len()),
        ("hidden", hidden, &file.hidden),
        ("heads", heads, &file.heads),
        ("kv_heads", kv_heads, &file.kv_heads),
        ("head_size", head_size, &file.head_size),
        ("rope_dims", rope_dims, &file.rope_dims),
        ("ffn", ffn, &file.ffn),
        ("vocab", vocab, &file.vocab),
        ("biases", biases, &file.biases),
        ("head_norms", head_norms, &file.head_norms),
        ("tied", tied, &file.tied),
    ];
    let mixtures = || {
        let text =
            |mixture: &Option<Mixture>| mixture.map_or("none".into(), |own| format!("{own:?}"));
        differs("a mixture", &text(mixture), &text(&file.mixture))
    };
    let tables = || {
        let embedding = matrix_difference("token_embd", embedding, &file.embedding);
        embedding.or_else(|| matrix_difference("output", head, &file.head))
    };
    let each = || {
        let mut pairs = layers.iter().zip(&file.layers).enumerate();
        pairs.find_map(|(at, (planned, has))| layer_difference(at, planned, has))
    };
    sizes
        .into_iter()
        .find_map(|(what, planned, has)| differs(what, planned, has))
        .or_else(mixtures)
        .or_else(|| variant_difference(variant, &file.variant))
        .or_else(each)
        .or_else(tables)
}

/// The first thing that two variants do differently.
fn variant_difference(plan: &Variant, file: &Variant) -> Option<String> {
    let list = |of: &Variant| {
        let number = |number: Option<Number>| number.map_or("none".into(), |n| n.get().to_string());
        [
            ("activation", format!("{:?}", of.activation)),
            ("post_norms", of.post_norms.to_string()),
            ("output_bias", of.output_bias.to_string()),
            ("sinks", of.sinks.to_string()),
            ("fused_qkv", of.fused_qkv.to_string()),
            ("fused_gate_up", of.fused_gate_up.to_string()),
            ("embedding_scale", number(of.embedding_scale)),
            ("attention_scale", number(of.attention_scale)),
            ("residual_scale", number(of.residual_scale)),
            ("logit_scale", number(of.logit_scale)),
            ("attention_cap", number(of.attention_cap)),
            ("logit_cap", number(of.logit_cap)),
        ]
    };
    let mut pairs = list(plan).into_iter().zip(list(file));
    pairs.find_map(|((what, planned), (_, has))| {
        (planned != has).then(|| format!("made for {what} {planned}, the file has {has}"))
    })
}

/// A matrix with its name in a layer.
type Named<'a> = (&'static str, &'a Matrix);

/// The first difference of two layers, with the names that GGUF files have for their matrices.
fn layer_difference(at: usize, plan: &Layer, file: &Layer) -> Option<String> {
    let names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    let mut matrices = plan.matrices().into_iter().zip(file.matrices()).zip(names);
    let differ = |(((_, planned), (_, has)), name): ((Named<'_>, Named<'_>), &str)| {
        matrix_difference(&format!("blk.{at}.{name}"), planned, has)
    };
    let (planned, has) = (plan.other_bytes, file.other_bytes);
    let other =
        || format!("made for {planned} bytes of norms and biases in blk.{at}, the file has {has}");
    let experts = || {
        let always = |layer: &'_ Layer| {
            layer.experts.map(|own| own.always().map(|(name, m)| (name, *m)).collect::<Vec<_>>())
        };
        let (planned, has) = (always(plan).unwrap_or_default(), always(file).unwrap_or_default());
        let mut pairs = planned.into_iter().zip(has);
        pairs.find_map(|((name, one), (_, other))| {
            matrix_difference(&format!("blk.{at} {name}"), &one, &other)
        })
    };
    let positions = |layer: &Layer| {
        let window = layer.window.map_or("none".into(), |window| window.to_string());
        format!("window {window} and {:?} angles", layer.turning)
    };
    let differs = || {
        let (planned, has) = (positions(plan), positions(file));
        (planned != has).then(|| format!("made for {planned} in blk.{at}, the file has {has}"))
    };
    let other = || (planned != has).then(other);
    matrices.find_map(differ).or_else(experts).or_else(other).or_else(differs)
}

fn matrix_difference(name: &str, plan: &Matrix, file: &Matrix) -> Option<String> {
    if plan.quant != file.quant {
        let (planned, has) = (plan.quant, file.quant);
        return Some(format!("made for weights of type {planned} in {name}, the file has {has}"));
    }
    let (planned, has) = ((plan.rows, plan.cols), (file.rows, file.cols));
    (planned != has).then(|| {
        let size = |(rows, cols): (u64, u64)| format!("{rows} x {cols}");
        format!("made for {name} of {}, the file has {}", size(planned), size(has))
    })
}

/// Refuses a step that cannot be.
pub(crate) fn check(programs: &Programs, vocab: u64, step: &Step<'_>) -> Result<(), LlmError> {
    let context = programs.space().context as usize;
    for part in step.parts {
        // What comes from a peer may be any number.
        let tokens = usize::try_from(part.past).unwrap_or(usize::MAX);
        let tokens = tokens.saturating_add(part.tokens.len());
        if tokens > context {
            return Err(LlmError::Context { tokens, context });
        }
        if let Some(&token) = part.tokens.iter().find(|&&token| u64::from(token) >= vocab) {
            return Err(LlmError::Token { token, vocab });
        }
    }
    let possible = 1..=spanker_plan::MAX_CANDIDATES;
    let too_many = step.candidates().is_some_and(|k| !possible.contains(&u64::from(k)));
    programs.check(step).map_err(|error| match too_many {
        true => LlmError::unsupported(error.to_string()),
        false => LlmError::plan(error.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use spanker_model::{Quant, builtin};

    use super::*;

    #[test]
    fn difference_of_models_names_the_first_field_with_both_values() {
        let file = builtin("smollm2-135m", Quant::Q4_1).expect("a model");
        let named = Model { name: "x".into(), source: "gguf".into(), context: 1, ..file.clone() };
        assert_eq!(difference(&named, &file), None);
        let plan = builtin("smollm2-135m", Quant::Q4_0).expect("a model");
        assert_eq!(
            difference(&plan, &file).as_deref(),
            Some("made for weights of type q4_0 in blk.0.attn_q, the file has q4_1")
        );
        let mut late = file.clone();
        late.layers[7].down.quant = Quant::Q6K;
        late.layers[7].other_bytes += 4;
        assert_eq!(
            difference(&late, &file).as_deref(),
            Some("made for weights of type q6_k in blk.7.ffn_down, the file has q4_1")
        );
        late.layers[7].down.quant = Quant::Q4_1;
        let text = difference(&late, &file).expect("other bytes");
        assert!(text.contains("bytes of norms and biases in blk.7"), "{text}");
        let mut table = file.clone();
        table.head.quant = Quant::Q8_0;
        let text = difference(&table, &file).expect("another head");
        assert_eq!(text, "made for weights of type q8_0 in output, the file has q4_1");
        let wide = Model { ffn: 7, ..file.clone() };
        let text = difference(&wide, &file).expect("another width");
        assert_eq!(text, "made for smollm2-135m with ffn 7, the file has 1536");
    }
}
