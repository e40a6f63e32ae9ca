// SPDX-License-Identifier: Apache-2.0
//! What a service does with a model on some cards, known without running it: the plan that it goes by, and what clients of
//! it will see. Services that run begin with the same plan, and say the same of it.

use spanker_model::{KvShape, Model as Shape};
use spanker_plan::{Layout, Plan, Request, StepPrices, steps_under_way};
use spanker_topology::{Cluster, Seconds};

use super::ServiceOptions;
use crate::batch::{Arrivals, Forecast, Pacing, ServiceLoad, forecast};
use crate::error::{EngineError, Result};
use crate::host::{Fabric, Host};
use crate::layout;
use crate::model::Model;

/// Clients whose experience is foretold.
const CLIENTS: [usize; 3] = [1, 4, 16];
/// What they ask for: tokens of a prompt and of an answer.
const USUAL: (usize, usize) = (64, 48);

/// What a service would do.
#[derive(Debug, Clone)]
pub struct ServicePlan {
    /// How it would begin: which card holds what, with which blocks for keys and values.
    pub plan: Plan,
    /// The layout in words.
    pub layout: String,
    /// For some numbers of clients the tokens in a second that they would have together.
    pub expected: Vec<(usize, f64)>,
    pacings: Vec<(Pacing, usize)>,
    options: ServiceOptions,
}

impl ServicePlan {
    /// On the cards of a host.
    ///
    /// # Errors
    /// As [`super::Service::start`].
    pub fn on_host(host: &Host, model: &Model, options: &ServiceOptions) -> Result<ServicePlan> {
        let audit = host.audit(options.audit)?;
        ServicePlan::of(first_plan(host, model, options, audit)?, options)
    }

    /// On cards behind the ABI that only their profiles are known of.
    ///
    /// # Errors
    /// [`EngineError::DoesNotFit`], or [`EngineError::Request`] for options that make no sense.
    pub fn on_cluster(
        shape: &Shape,
        cluster: &Cluster,
        options: &ServiceOptions,
    ) -> Result<ServicePlan> {
        let audit = options.audit.unwrap_or(Fabric::Cards.usual_audit());
        let numbers: Vec<usize> = (0..cluster.cards()).collect();
        let plan = fitting(shape, options, &|blocks| {
            let request = request(options, audit, blocks);
            let layout = match options.wish.layout(shape, cluster.cards())? {
                Some(layout) => layout,
                None => layout::best(shape, cluster, &request, true, true)?,
            };
            layout::fitting(Plan::new(shape.clone(), cluster.clone(), request, layout)?, &numbers)
        })?;
        ServicePlan::of(plan, options)
    }

    /// The same layout with other prices.
    ///
    /// # Errors
    /// [`EngineError::Plan`] for a plan that does not fit together.
    pub fn priced(&self, plan: Plan) -> Result<ServicePlan> {
        ServicePlan::of(plan, &self.options)
    }

    /// The same where handing a token to its client takes so many seconds from those who compute.
    #[must_use]
    pub fn delivering(mut self, seconds: f64) -> ServicePlan {
        for (pacing, _) in &mut self.pacings {
            pacing.prices = pacing.prices.clone().with_each_output(Seconds(seconds));
        }
        self
    }

    /// What clients will see, as [`super::Service::forecast`] has it.
    #[must_use]
    pub fn forecast(&self, load: ServiceLoad) -> Forecast {
        foretold(&self.pacings, &self.options, load)
    }

    fn of(plan: Plan, options: &ServiceOptions) -> Result<ServicePlan> {
        let copies = layout::copies(&plan)?;
        let pacing = |copy: &Plan| {
            let depth = steps_under_way(&copy.request, copy.layout.pipeline_stages());
            pacing(copy, depth as usize, options.draft.is_eager())
        };
        let pacings: Vec<(Pacing, usize)> = copies.iter().map(pacing).collect();
        let layouts: Vec<&Layout> = copies.iter().map(|copy| &copy.layout).collect();
        let (layout, expected) = (words(&layouts), rates(&pacings, options.context));
        Ok(ServicePlan { plan, layout, expected, pacings, options: options.clone() })
    }
}

/// What clients of a service with these options will see.
pub(super) fn foretold(
    copies: &[(Pacing, usize)],
    options: &ServiceOptions,
    load: ServiceLoad,
) -> Forecast {
    let shared = if options.reuse { load.shared } else { 0 };
    forecast(copies, ServiceLoad { shared, ..load })
}

/// What is asked of a plan, with so many blocks for keys and values.
pub(super) fn request(options: &ServiceOptions, audit: f64, blocks: Option<u64>) -> Request {
    let ServiceOptions { context, batch, parallel, kv, .. } = *options;
    let request = layout::serving_request(context, batch, parallel);
    let guesses = options.draft.most_together();
    Request { blocks, guesses, audit, kv, ..request }
}

/// The plan that a service begins with.
pub(super) fn first_plan(
    host: &Host,
    model: &Model,
    options: &ServiceOptions,
    audit: f64,
) -> Result<Plan> {
    fitting(model.shape(), options, &|blocks| {
        host.plan(model, &request(options, audit, blocks), &options.wish)
    })
}

/// A plan with the blocks that were asked for, or as many as there is memory for: enough for one sequence at least, and no
/// more than all could need.
pub(super) fn fitting(
    shape: &Shape,
    options: &ServiceOptions,
    plan: &dyn Fn(Option<u64>) -> Result<Plan>,
) -> Result<Plan> {
    let one = KvShape::blocks_for(options.context as u64);
    if let Some(bytes) = options.kv_memory {
        // Layers with a window may have blocks of their own, of which there are not so many.
        let kept = |copies: u64, blocks| {
            let all = request(options, 0.0, Some(blocks));
            let sequences = all.sequences.div_ceil(copies);
            copies * Request { sequences, ..all }.kv_bytes(shape)
        };
        let most = |copies: u64| {
            let each = (kept(copies, 1) / shape.layers.len() as u64).max(1);
            let (mut blocks, mut more) = (0, bytes / each + 1);
            while more - blocks > 1 {
                let middle = blocks.midpoint(more);
                *(if kept(copies, middle) <= bytes { &mut blocks } else { &mut more }) = middle;
            }
            blocks
        };
        let blocks = most(1);
        if blocks < one {
            let context = options.context;
            let needed = kept(1, one);
            return Err(EngineError::request(format!(
                "--kv-memory {bytes}: a context of {context} tokens takes {needed} bytes"
            )));
        }
        let plan = plan(Some(blocks))?;
        // Copies of the model share the memory; a context has to fit into each.
        let copies = plan.layout.replicas.len().max(1) as u64;
        let blocks = Some(most(copies).max(one));
        let Plan { model, cluster, request, layout, .. } = plan;
        return Ok(Plan::new(model, cluster, Request { blocks, ..request }, layout)?);
    }
    let all = one * options.parallel as u64;
    let error = match plan(None) {
        Err(error @ EngineError::DoesNotFit { .. }) => error,
        other => return other,
    };
    // As many as fit.
    let (mut least, mut most, mut best) = (one, all, None);
    while least < most {
        let middle = least.midpoint(most);
        match plan(Some(middle)) {
            Ok(fits) => (least, best) = (middle + 1, Some(fits)),
            Err(EngineError::DoesNotFit { .. }) => most = middle,
            Err(error) => return Err(error),
        }
    }
    best.ok_or(error)
}

/// What decides how fast a copy of the model is that has so many steps under way, and its blocks.
pub(super) fn pacing(copy: &Plan, depth: usize, is_eager: bool) -> (Pacing, usize) {
    let Request { sequences, batch, .. } = copy.request;
    let (parallel, batch) = (sequences as usize, batch as usize);
    let outputs = copy.request.outputs_for(sequences) as usize;
    let blocks = copy.request.blocks_for(sequences) as usize;
    let depth = depth.min(parallel).max(1);
    let prices = StepPrices::new(copy);
    (Pacing { prices, batch, parallel, outputs, depth, is_eager }, blocks)
}

/// How copies of a model are laid out, in words.
pub(super) fn words(copies: &[&Layout]) -> String {
    let Some(first) = copies.first() else { return "on no cards".to_owned() };
    let (strategy, cards) = (first.strategy(), first.cards().len());
    let on = if cards == 1 { "card" } else { "cards" };
    match copies.len() {
        1 => format!("{strategy} on {cards} {on}"),
        count => format!("{count} copies, {strategy} on {cards} {on} each"),
    }
}

/// Tokens in a second that some numbers of clients will see together.
pub(super) fn rates(copies: &[(Pacing, usize)], context: usize) -> Vec<(usize, f64)> {
    let (prompt, answer) = USUAL;
    let room = context.saturating_sub(1);
    let (prompt, answer) = (prompt.min(room.max(1)), answer.min((room / 2).max(1)));
    let rate = |clients: usize| {
        let arrivals = Arrivals::Closed;
        let load = ServiceLoad { clients, prompt, shared: 0, answer, requests: 2, arrivals };
        forecast(copies, load).tokens_per_second
    };
    CLIENTS.into_iter().map(|clients| (clients, rate(clients))).collect()
}
