// SPDX-License-Identifier: Apache-2.0
//! The model's side of a service: requests one after the other.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use super::ask::{Ask, Delivery, Done, ServedPiece, Update};
use super::{ServiceOptions, Shared};
use crate::engine::Engine;
use crate::error::Result;
use crate::host::Host;
use crate::layout;
use crate::model::Model;
use crate::summary::FinishReason;

/// A request on its way to the model.
pub(crate) struct Order {
    pub(crate) ask: Ask,
    pub(crate) deliver: Delivery,
}

pub(crate) struct Worker<'h> {
    engine: Engine<'h>,
    shared: &'h Arc<Shared>,
}

impl<'h> Worker<'h> {
    pub(crate) fn load(
        host: &'h Host,
        model: &'h Model,
        options: &ServiceOptions,
        shared: &'h Arc<Shared>,
    ) -> Result<Worker<'h>> {
        let ServiceOptions { context, batch, audit, .. } = *options;
        let mut request = layout::request(context, batch, context / 2, context / 2);
        request.audit = host.audit(audit)?;
        let plan = host.plan(model, &request, &options.wish)?;
        let engine = Engine::load(host, model, plan)?;
        shared.update(|status| {
            status.fabric = host.fabric().name();
            status.layout = engine.plan().layout.strategy().name().to_owned();
            status.copies = 1;
        });
        Ok(Worker { engine, shared })
    }

    /// Answers until nobody can ask.
    pub(crate) fn work(&mut self, orders: &Receiver<Order>) {
        while let Ok(order) = orders.recv() {
            self.shared.update(|status| (status.waiting, status.running) = (status.waiting - 1, 1));
            self.answer(order);
            self.shared.update(|status| status.running = 0);
        }
    }

    fn answer(&mut self, order: Order) {
        let Order { ask, mut deliver, .. } = order;
        let begun = Instant::now();
        let mut first = None;
        if !deliver(Update::Begun { cached_tokens: 0 }) {
            return self.shared.update(|status| status.cancelled += 1);
        }
        self.engine.cut(0);
        let stop = ask.limits.stop.clone();
        let stops = ask.limits.stops.clone();
        let failed = |error: &dyn std::fmt::Display| Update::Failed {
            what: error.to_string(),
            is_request: false,
        };
        let mut generation = match self.engine.generate(&ask.prompt, ask.sampling, ask.limits) {
            Ok(generation) => generation,
            Err(error) => {
                deliver(failed(&error));
                return self.shared.update(|status| status.failed += 1);
            }
        };
        for piece in &mut generation {
            first.get_or_insert_with(Instant::now);
            let update = match piece {
                Ok(piece) => Update::Piece(ServedPiece {
                    token: piece.token,
                    text: piece.text,
                    chances: Vec::new(),
                    corrects: piece.corrects,
                }),
                Err(error) => {
                    deliver(failed(&error));
                    return self.shared.update(|status| status.failed += 1);
                }
            };
            if !deliver(update) {
                stop.stop();
            }
        }
        let (answer, _) = generation.into_answer();
        let first = first.unwrap_or_else(Instant::now);
        let reason = answer.finish.unwrap_or(FinishReason::Stopped);
        let done = Done {
            reason,
            stop: stops.into_iter().next().filter(|_| reason == FinishReason::StopString),
            prompt_tokens: answer.prompt_tokens,
            cached_tokens: 0,
            tokens: answer.tokens.len(),
            waited: std::time::Duration::ZERO,
            prompt: first - begun,
            generation: first.elapsed(),
        };
        self.shared.update(|status| {
            status.prompt_tokens += done.prompt_tokens as u64;
            status.tokens += done.tokens as u64;
            status.answered += 1;
        });
        deliver(Update::Done(done));
    }
}
