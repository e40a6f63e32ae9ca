// SPDX-License-Identifier: Apache-2.0
//! What a service would do, as a report beside a plan has it.

use serde::Serialize;

use crate::service::{ServiceOptions, ServicePlan};

/// What a service would do.
#[derive(Debug, Clone, Serialize)]
pub struct ServedReport {
    /// Requests that are answered at the same time.
    pub parallel: usize,
    /// Tokens of a request.
    pub context: usize,
    /// How the model would be laid out, in words.
    pub layout: String,
    /// Copies of the model.
    pub copies: usize,
    /// Blocks of keys and values of all copies.
    pub kv_blocks: u64,
    /// What some numbers of clients would have.
    pub expected: Vec<ExpectedRate>,
}

/// Tokens in a second of so many clients together.
#[derive(Debug, Clone, Serialize)]
pub struct ExpectedRate {
    /// How many clients.
    pub clients: usize,
    /// Tokens of all of them.
    pub tokens_per_second: f64,
}

impl ServedReport {
    /// Of a plan that was made for these options.
    #[must_use]
    pub fn new(planned: ServicePlan, options: &ServiceOptions) -> ServedReport {
        let (request, copies) = (&planned.plan.request, planned.plan.layout.replicas.len());
        let rate = |(clients, tokens_per_second)| ExpectedRate { clients, tokens_per_second };
        ServedReport {
            parallel: options.parallel,
            context: options.context,
            copies,
            kv_blocks: match request.blocks {
                // Those of each copy.
                Some(blocks) => blocks * copies as u64,
                None => request.blocks_for(request.sequences),
            },
            layout: planned.layout,
            expected: planned.expected.into_iter().map(rate).collect(),
        }
    }

    /// The same in words.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let mut lines =
            vec![format!("spanker serve --parallel {}: {}", self.parallel, self.layout)];
        lines.extend(self.expected.iter().map(|ExpectedRate { clients, tokens_per_second }| {
            let many = if *clients == 1 { "" } else { "s" };
            format!("  {clients:>2} client{many}: {tokens_per_second:.1} tokens/s in all")
        }));
        lines
    }
}
