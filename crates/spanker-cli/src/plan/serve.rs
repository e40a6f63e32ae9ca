// SPDX-License-Identifier: Apache-2.0
//! What `spanker serve` would do, beside a plan for as many sequences: the layout that it would choose, and what it would
//! expect for some numbers of clients. The engine says so by what a service begins with; nothing is planned here.

use serde::Serialize;
use spanker_engine::{EngineError, ServiceOptions, Wish};
use spanker_model::Model;

use super::{Args, Served};
use crate::output;

/// What a service would do.
#[derive(Debug, Serialize)]
pub(super) struct Serving {
    /// Requests that are answered at the same time.
    parallel: usize,
    /// Tokens of a request.
    context: usize,
    /// How the model would be laid out, in words.
    layout: String,
    copies: usize,
    /// Blocks of keys and values of all copies.
    kv_blocks: u64,
    expected: Vec<Expected>,
}

/// Tokens in a second of so many clients together.
#[derive(Debug, Serialize)]
struct Expected {
    clients: usize,
    tokens_per_second: f64,
}

/// What a service with as many requests at a time would do; nothing if it does not fit.
pub(super) fn planned(
    args: &Args,
    model: &Model,
    served: &Served<'_>,
) -> anyhow::Result<Option<Serving>> {
    let context = usize::try_from(args.context.min(model.context))?;
    let parallel = usize::try_from(args.concurrency.unwrap_or(1))?;
    let options = ServiceOptions {
        parallel,
        context,
        batch: usize::try_from(args.batch_size)?.min(context),
        kv_memory: None,
        kv: args.kv,
        queue: 0,
        wish: Wish::default(),
        audit: args.audit,
        reuse: true,
        draft: args.draft.source(),
    };
    let found = match served(&options) {
        Ok(found) => found,
        Err(EngineError::DoesNotFit { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let (request, copies) = (&found.plan.request, found.plan.layout.replicas.len());
    let expected = found.expected.into_iter();
    let expected =
        expected.map(|(clients, tokens_per_second)| Expected { clients, tokens_per_second });
    Ok(Some(Serving {
        parallel,
        context,
        layout: found.layout,
        copies,
        kv_blocks: match request.blocks {
            // Those of each copy.
            Some(blocks) => blocks * copies as u64,
            None => request.blocks_for(request.sequences),
        },
        expected: expected.collect(),
    }))
}

impl Serving {
    /// Says so to people.
    pub(super) fn show(&self) -> anyhow::Result<()> {
        let Serving { parallel, layout, .. } = self;
        output::line(&format!("\nspanker serve --parallel {parallel}: {layout}"))?;
        for Expected { clients, tokens_per_second } in &self.expected {
            let many = if *clients == 1 { "" } else { "s" };
            output::line(&format!(
                "  {clients:>2} client{many}: {tokens_per_second:.1} tokens/s in all"
            ))?;
        }
        Ok(())
    }
}
