// SPDX-License-Identifier: Apache-2.0
//! The feed-forward half of a layer that is a mixture of experts.
//!
//! Every card has the same rows of every expert, so all cards work on every token, whichever experts it meets. The router
//! is whole on every card: logits, picks and weights are the same bits everywhere. Of the expert that every token meets,
//! cards have rows as of any dense network; its weight is the only pick of a router with one row.

use std::ops::Range;

use spanker_model::{Gating, Mixture, Quant};

use super::weights::HeldExperts;
use super::write::{F32, after, ggml_id};
use super::{Buffer, Held, HeldFfn, Sink, Writer};
use crate::Activity;
use crate::cost::shard::{Shard, Split, len};
use crate::work::{PICK_BYTES, Picks, Place, Work};

/// Logits of a row, and bytes of its picks, on every card.
pub(super) fn routed(mixture: Mixture) -> (u64, u64) {
    let shared = u64::from(mixture.shared > 0);
    (mixture.experts + shared, (mixture.used + shared) * PICK_BYTES)
}

impl<S: Sink> Writer<'_, S> {
    /// Norm, router, gate, up and down of the experts that rows have picked, and their sum in the residual stream.
    pub(super) fn mixture(
        &mut self,
        (stage, layer, number): (usize, usize, usize),
        members: Range<usize>,
        mixture: Mixture,
    ) {
        self.mark(members.clone(), Activity::Up, number);
        for member in members.clone() {
            self.meet(member, layer, mixture);
        }
        let rows = self.rows * mixture.used;
        let weights = self.held(members.start, layer).ffn.down.quant;
        let width = self.of.model.ffn;
        let part = |shard: &Shard| shard.ffn.clone();
        self.join((stage, rows), members.clone(), Buffer::Gate, width, part, weights);
        self.mark(members.clone(), Activity::Down, number);
        for member in members.clone() {
            self.expert_down(member, layer, mixture);
        }
        let shared = self.held(members.start, layer).experts.and_then(|experts| experts.shared);
        if let Some((_, ffn)) = shared {
            let part = |shard: &Shard| shard.shared.clone();
            let (rows, width, weights) = (self.rows, mixture.shared, ffn.down.quant);
            // The sums of the experts lie where parts of what is joined go.
            self.join((stage, rows), members.clone(), Buffer::SharedGate, width, part, weights);
        }
        for member in members.clone() {
            self.combine(member, stage, layer, mixture);
        }
        self.spread(stage, members.clone(), |shard| &shard.down);
        for member in members {
            self.down_biases(member, layer, mixture);
        }
    }

    /// The weighed biases of the ways down, which every card adds to what all cards have.
    fn down_biases(&mut self, member: usize, layer: usize, mixture: Mixture) {
        let biases = self.held(member, layer).experts.and_then(|own| own.biases);
        let Some((_, [_, _, (table, stride)])) = biases else { return };
        let (into, picks) = (self.place(member, Buffer::Y), self.picks(member, mixture));
        let (rows, width) = (self.rows, self.of.model.hidden);
        let weighed = true;
        self.work(member, Work::AddPicked { into, table, picks, rows, width, stride, weighed });
    }

    fn picks(&self, member: usize, mixture: Mixture) -> Picks {
        let Mixture { experts, used, .. } = mixture;
        Picks { at: self.place(member, Buffer::Picks), used, experts }
    }

    /// The one pick of a row that is the shared expert.
    fn shared_pick(&self, member: usize, mixture: Mixture) -> Picks {
        let at = after(self.place(member, Buffer::Picks), self.rows * mixture.used * PICK_BYTES);
        Picks { at, used: 1, experts: 1 }
    }

    /// Logits of a router, and the picks that follow from them.
    fn route(
        &mut self,
        member: usize,
        (router, bias): (Held, Option<Place>),
        logits: Place,
        picks: Picks,
        gating: Gating,
    ) {
        let rows = self.rows;
        self.input(member, router.quant);
        let a = self.input_place(member, router.quant);
        self.product(member, router, a, logits, rows);
        if let Some(row) = bias {
            let width = picks.experts;
            self.work(member, Work::AddRow { into: logits, row, rows, width });
        }
        self.work(member, Work::Route { logits, picks, rows, gating: gating.code() });
    }

    /// Norm, router, and gate with up of the experts that rows meet.
    fn meet(&mut self, member: usize, layer: usize, mixture: Mixture) {
        let held = self.held(member, layer);
        let Some(own) = held.experts else { return };
        let HeldExperts { strides, router, biases, shared, .. } = own;
        let works = |ffn: &HeldFfn| ffn.gate.rows > 0 || ffn.down.rows * ffn.down.cols > 0;
        // Biases of the ways down are added on every card.
        let idle = !works(&held.ffn) && !shared.is_some_and(|(_, ffn)| works(&ffn));
        if idle && biases.is_none() {
            return;
        }
        self.norm(member, held.ffn_norm);
        let (rows, logits) = (self.rows, self.place(member, Buffer::Router));
        let picks = self.picks(member, mixture);
        let bias = biases.map(|(bias, _)| bias);
        self.route(member, (router, bias), logits, picks, mixture.gating);
        if let Some((router, ffn)) = shared {
            let logits = after(logits, rows * mixture.experts * F32);
            let picks = self.shared_pick(member, mixture);
            self.route(member, (router, None), logits, picks, Gating::Sigmoid);
            self.gated(member, ffn);
        }
        let HeldFfn { gate, up, .. } = held.ffn;
        if gate.rows == 0 {
            return;
        }
        [gate, up].iter().for_each(|held| self.input(member, held.quant));
        for ((held, buffer), stride) in
            [(gate, Buffer::Gate), (up, Buffer::Up)].into_iter().zip(strides)
        {
            let (a, out) = (self.input_place(member, held.quant), self.place(member, buffer));
            self.expert_product(member, held, [a, out], picks, stride, false);
        }
        let width = gate.rows;
        if let Some((_, [gate, up, _])) = biases {
            for ((table, stride), buffer) in [(gate, Buffer::Gate), (up, Buffer::Up)] {
                let (into, weighed) = (self.place(member, buffer), false);
                let add = Work::AddPicked { into, table, picks, rows, width, stride, weighed };
                self.work(member, add);
            }
        }
        let elements = rows * mixture.used * width;
        let [gate, up] = [Buffer::Gate, Buffer::Up].map(|buffer| self.place(member, buffer));
        let activation = self.of.model.variant.activation;
        self.work(member, Work::Gate { gate, up, into: gate, elements, activation });
    }

    /// Gate and up of the shared expert.
    fn gated(&mut self, member: usize, ffn: HeldFfn) {
        if ffn.gate.rows == 0 {
            return;
        }
        let (rows, pair) = (self.rows, [ffn.gate, ffn.up]);
        pair.iter().for_each(|held| self.input(member, held.quant));
        let places = [Buffer::SharedGate, Buffer::SharedUp].map(|of| self.place(member, of));
        for (held, out) in pair.into_iter().zip(places) {
            let a = self.input_place(member, held.quant);
            self.product(member, held, a, out, rows);
        }
        let [gate, up] = places;
        let elements = rows * ffn.gate.rows;
        let activation = self.of.model.variant.activation;
        self.work(member, Work::Gate { gate, up, into: gate, elements, activation });
    }

    fn expert_product(
        &mut self,
        member: usize,
        held: Held,
        [a, out]: [Place; 2],
        picks: Picks,
        stride: u64,
        apart: bool,
    ) {
        let types = [ggml_id(held.quant.input()), ggml_id(held.quant)];
        let shape = [self.rows, held.cols, held.rows];
        let b = held.place;
        self.work(member, Work::MatmulExperts { a, b, out, picks, shape, types, stride, apart });
    }

    /// The way down of the experts that rows meet: a row for each pick.
    fn expert_down(&mut self, member: usize, layer: usize, mixture: Mixture) {
        let held = self.held(member, layer);
        let (down, strides) = (held.ffn.down, held.experts.map_or([0; 3], |own| own.strides));
        if down.rows * down.cols == 0 {
            return;
        }
        let [a, out] = [Buffer::Whole, Buffer::Experts].map(|of| self.place(member, of));
        let picks = self.picks(member, mixture);
        self.expert_product(member, down, [a, out], picks, strides[2], true);
    }

    /// The weighed sum of all experts, where the second product of a dense pair would be.
    fn combine(&mut self, member: usize, stage: usize, layer: usize, mixture: Mixture) {
        let held = self.held(member, layer);
        let (rows, down) = (self.rows, held.ffn.down);
        let gathers = self.of.stages[stage].0 == Split::Gather;
        let into = self.place(member, if gathers { Buffer::Part } else { Buffer::Y });
        let (from, width) = (self.place(member, Buffer::Experts), down.rows);
        if down.cols == 0 {
            let length = rows * width * F32;
            self.work(member, Work::Fill { into, length, pattern: 0 });
        } else if width > 0 {
            let picks = self.picks(member, mixture);
            self.work(member, Work::Combine { from, picks, into, rows, width, add: false });
        }
        let Some((_, ffn)) = held.experts.and_then(|own| own.shared) else { return };
        if ffn.down.cols > 0 && ffn.down.rows > 0 {
            let a = self.place(member, Buffer::Whole);
            self.product(member, ffn.down, a, from, rows);
            let picks = self.shared_pick(member, mixture);
            self.work(member, Work::Combine { from, picks, into, rows, width, add: true });
        }
    }
}

/// Numbers of the rows of a mixture between its products, for a shard: of gate and up, and of the shared expert's.
pub(super) fn inner(mixture: Option<Mixture>, shard: &Shard) -> u64 {
    let used = mixture.map_or(1, |own| own.used);
    (used * len(&shard.ffn)).max(len(&shard.shared))
}

/// Bytes of a row of inputs of the second products of a layer.
pub(super) fn joined(
    mixture: Option<Mixture>,
    ffn: u64,
    down: Quant,
    shared: Option<Quant>,
) -> u64 {
    let used = mixture.map_or(1, |own| own.used);
    let own = used * down.input().row_bytes(ffn);
    let width = mixture.map_or(0, |own| own.shared);
    own.max(shared.map_or(0, |quant| quant.input().row_bytes(width)))
}
