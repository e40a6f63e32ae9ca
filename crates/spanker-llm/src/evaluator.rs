// SPDX-License-Identifier: Apache-2.0
//! A model on the host, token by token and layer by layer, by the kernels alone: the definition that runners
//! are compared with.
//!
//! No programs, cards or exchanges are involved, so nothing that a runner can get wrong is shared with it. A
//! layout matters in one respect: where it splits columns, the partial sums are added in card order, which is
//! what a reduce split is defined to compute. With [`Rounding::Random`] every rounding that a reduce split can
//! turn the other way goes a random way: see [`crate::Bound`]. It is no fast way to run a model.

use std::ops::Range;
use std::time::Instant;

use ggml_spanker::ops::{self, AttendScratch, KvView, Queries};
use ggml_spanker::{Inputs, decode, multiply, quantize};
use spanker_model::gguf::ffn_norm;
use spanker_model::{Gating, KV_BLOCK, KvShape, Mixture, Number, Quant, Turning};
use spanker_plan::{Cut, Layout, Piece, Shard, Split, Stage, Tensor, Want};

use crate::runner::{Outcome, Output, Part, Runner, Step, Timing};
use crate::{LlmError, Network};

/// How activations are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest, as every runner does.
    Nearest,
    /// Up or down at random, in proportion to how near each is. Two runs differ by at most one quantum in an
    /// 8-bit block, by one unit in the last place of a key or value, and by the roundings of its additions in
    /// a partial sum.
    Random {
        /// Which random numbers.
        seed: u64,
        /// Partial sums that are added: the number of cards.
        parts: usize,
    },
}

/// Keys and values of one layer of the one sequence, in blocks in order.
#[derive(Debug, Clone, Default)]
struct Cache {
    blocks: Vec<u8>,
}

/// A model on the host.
#[derive(Debug)]
pub struct Evaluator<'a, B> {
    network: &'a Network<B>,
    /// For each layer, the shards whose partial sums are added; none where columns are not split.
    shards: Vec<Vec<Shard>>,
    caches: Vec<Cache>,
    noise: Option<Noise>,
    threads: usize,
    /// Tokens of the context that it stands for.
    context: usize,
    /// What came of the step that is under way.
    ended: Option<Outcome>,
}

impl<'a, B: AsRef<[u8]> + Sync> Evaluator<'a, B> {
    /// Makes a network ready to be run as a layout defines it, with `threads` threads for large products.
    ///
    /// # Errors
    /// [`LlmError::Plan`] if the layout has not exactly one copy of every layer of this network.
    pub fn new(
        network: &'a Network<B>,
        layout: &Layout,
        rounding: Rounding,
        threads: usize,
    ) -> Result<Self, LlmError> {
        let stages: &[Stage] = match &layout.replicas[..] {
            [one] => one,
            copies => {
                let copies = copies.len();
                return Err(LlmError::plan(format!("{copies} copies of the model, and not one")));
            }
        };
        let mut shards = Vec::new();
        for stage in stages {
            let group = &stage.group;
            let split = group.split == Split::Reduce && group.shards.len() > 1;
            let parts = if split { group.shards.clone() } else { Vec::new() };
            shards.extend(stage.layers.clone().map(|_| parts.clone()));
        }
        let layers = network.model().layers.len();
        if shards.len() != layers {
            let what = format!("it has {} layers, the model {layers}", shards.len());
            return Err(LlmError::plan(what));
        }
        let noise = match rounding {
            Rounding::Nearest => None,
            Rounding::Random { seed, parts } => Some(Noise { state: seed, parts }),
        };
        let caches = vec![Cache::default(); layers];
        let (threads, context) = (threads.max(1), 0);
        Ok(Evaluator { network, shards, caches, noise, threads, context, ended: None })
    }

    /// The same for a context of so many tokens: in long ones, positions of some models have other angles.
    #[must_use]
    pub fn in_context(mut self, tokens: usize) -> Self {
        self.context = tokens;
        self
    }

    /// The residual stream after the last layer for the next token.
    fn token(&mut self, position: usize, token: u64) -> Result<Vec<f32>, LlmError> {
        let mut x = self.embedding(token)?;
        let size = self.network.model().head_size;
        for layer in 0..self.caches.len() {
            let name = |rest: &str| format!("blk.{layer}.{rest}.weight");
            let heads = self.attention(layer, position, &x)?;
            let columns = |shard: &Shard| shard.heads.start * size..shard.heads.end * size;
            let mut output = self.second(layer, &name("attn_output"), heads, &columns)?;
            let variant = self.network.model().variant;
            if variant.output_bias {
                ops::add(&mut output, &self.vector(&format!("blk.{layer}.attn_output.bias"))?);
            }
            self.pass_on(&mut x, output, &name("post_attention_norm"))?;
            let norm = ffn_norm(&self.network.model().architecture);
            let h = self.normed(&x, &format!("blk.{layer}.{norm}"))?;
            let down = match self.network.model().mixture {
                Some(mixture) => self.mixture(layer, mixture, &h)?,
                None => {
                    let ffn = self.network.model().ffn;
                    let gate = self.rows(Tensor::Gate, layer, ffn, &h)?;
                    let up = self.rows(Tensor::Up, layer, ffn, &h)?;
                    let mut gated = vec![0.0; gate.len()];
                    ops::gate(variant.activation, &gate, &up, &mut gated);
                    let columns = |shard: &Shard| shard.ffn.clone();
                    self.second(layer, &name("ffn_down"), gated, &columns)?
                }
            };
            self.pass_on(&mut x, down, &name("post_ffw_norm"))?;
        }
        Ok(x)
    }

    /// Gate and up of a feed-forward network, of an expert's if that is one of several.
    fn gated(
        &mut self,
        [gate, up]: [&str; 2],
        expert: Option<u64>,
        h: &[f32],
    ) -> Result<Vec<f32>, LlmError> {
        let mut parts =
            [self.product_of(gate, expert, None, h)?, self.product_of(up, expert, None, h)?];
        for (name, row) in [gate, up].into_iter().zip(&mut parts) {
            if let Some(bias) = self.expert_bias(name, expert)? {
                ops::add(row, &bias);
            }
        }
        let [gate, up] = parts;
        let mut gated = vec![0.0; gate.len()];
        ops::gate(self.network.model().variant.activation, &gate, &up, &mut gated);
        Ok(gated)
    }

    /// The experts that a row meets, and their weighed sum. Where columns are split, each card has a sum of its own, of all
    /// experts; these are added in card order.
    fn mixture(&mut self, layer: usize, mixture: Mixture, h: &[f32]) -> Result<Vec<f32>, LlmError> {
        let name = |rest: &str| format!("blk.{layer}.{rest}.weight");
        let mut logits = self.product(&name("ffn_gate_inp"), None, h)?;
        if self.network.model().variant.expert_biases {
            ops::add(&mut logits, &self.vector(&format!("blk.{layer}.ffn_gate_inp.bias"))?);
        }
        let mut picks = vec![(0, 0.0); mixture.used as usize];
        ops::route(&logits, mixture.gating, &mut picks);
        let mut met = Vec::with_capacity(picks.len());
        for &(expert, weight) in &picks {
            let expert = Some(u64::from(expert));
            let gated = self.gated([&name("ffn_gate_exps"), &name("ffn_up_exps")], expert, h)?;
            met.push((expert, weight, gated));
        }
        let shared = match mixture.shared {
            0 => None,
            _ => {
                let logit = self.product(&name("ffn_gate_inp_shexp"), None, h)?;
                let mut pick = [(0, 0.0)];
                ops::route(&logit, Gating::Sigmoid, &mut pick);
                let gated =
                    self.gated([&name("ffn_gate_shexp"), &name("ffn_up_shexp")], None, h)?;
                Some((pick[0].1, gated))
            }
        };
        let parts = match self.shards[layer].is_empty() {
            true => vec![None],
            false => self.shards[layer].iter().cloned().map(Some).collect(),
        };
        let mut sum: Option<Vec<f32>> = None;
        for shard in parts {
            let mut part = vec![0.0; self.network.model().hidden as usize];
            let cut = shard.as_ref().map(|shard| shard.ffn.clone());
            if cut.as_ref().is_none_or(|cut| !cut.is_empty()) {
                for (expert, weight, gated) in &met {
                    let down = self.columns(&name("ffn_down_exps"), *expert, &cut, gated)?;
                    ops::combine(&down, [*weight].into_iter(), true, &mut part);
                }
            }
            let cut = shard.map(|shard| shard.shared);
            if let Some((weight, gated)) = &shared
                && cut.as_ref().is_none_or(|cut| !cut.is_empty())
            {
                let down = self.columns(&name("ffn_down_shexp"), None, &cut, gated)?;
                ops::combine(&down, [*weight].into_iter(), true, &mut part);
            }
            match &mut sum {
                None => sum = Some(part),
                Some(sum) => ops::add(sum, &part),
            }
        }
        let mut sum = sum.expect("there is at least one part");
        if let Some(noise) = &mut self.noise {
            let (tensor, _) = self.network.tensor(&name("ffn_down_exps"))?;
            noise.sums(&mut sum, tensor.dims[0] * mixture.used, tensor.quant);
        }
        for (expert, weight, _) in &met {
            if let Some(bias) = self.expert_bias(&name("ffn_down_exps"), *expert)? {
                ops::add_scaled(&mut sum, &bias, *weight);
            }
        }
        Ok(sum)
    }

    /// The bias of an expert, beside a matrix of that name, if the family has such.
    fn expert_bias(&self, matrix: &str, expert: Option<u64>) -> Result<Option<Vec<f32>>, LlmError> {
        let Some(expert) = expert.filter(|_| self.network.model().variant.expert_biases) else {
            return Ok(None);
        };
        let name = matrix.replace(".weight", ".bias");
        let width = self.network.tensor(&name)?.0.dims[0];
        let rows = expert * width..(expert + 1) * width;
        let bytes = &self.network.bytes()[self.network.rows_at(&name, &rows)?];
        Ok(Some(bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()))
    }

    /// A second product of a pair, of some columns.
    fn columns(
        &mut self,
        name: &str,
        expert: Option<u64>,
        cut: &Option<Range<u64>>,
        x: &[f32],
    ) -> Result<Vec<f32>, LlmError> {
        match cut {
            None => self.product_of(name, expert, None, x),
            Some(cut) => {
                let own = &x[cut.start as usize..cut.end as usize];
                self.product_of(name, expert, Some(Cut::Columns(cut.clone())), own)
            }
        }
    }

    /// What a product gives, added to the residual stream.
    fn pass_on(&mut self, x: &mut [f32], mut y: Vec<f32>, norm: &str) -> Result<(), LlmError> {
        let variant = &self.network.model().variant;
        if variant.post_norms {
            y = self.normed(&y, norm)?;
        }
        if let Some(scale) = variant.residual_scale {
            ops::scale(&mut y, scale.get(), 0.0);
        }
        self.add(x, &y);
        Ok(())
    }

    fn logits(&mut self, x: &[f32]) -> Result<Vec<f32>, LlmError> {
        let h = self.normed(x, "output_norm.weight")?;
        let (tied, variant) = (self.network.model().tied, self.network.model().variant);
        let mut logits =
            self.product(if tied { "token_embd.weight" } else { "output.weight" }, None, &h)?;
        if variant.logit_scale.is_some() || variant.logit_cap.is_some() {
            let [factor, cap] = [(variant.logit_scale, 1.0), (variant.logit_cap, 0.0)]
                .map(|(number, other)| number.map_or(other, Number::get));
            ops::scale(&mut logits, factor, cap);
        }
        Ok(logits)
    }

    /// All rows of a matrix of a layer, which may be a part of a tensor, times a row of activations.
    fn rows(
        &mut self,
        tensor: Tensor,
        layer: usize,
        rows: u64,
        x: &[f32],
    ) -> Result<Vec<f32>, LlmError> {
        let piece = Piece { tensor, layer, cut: Cut::Rows(0..rows) };
        let (name, cut) = self.network.source(&piece);
        self.product(&name, Some(cut), x)
    }

    /// Queries, keys and values of a token, and attention of all heads.
    fn attention(
        &mut self,
        layer: usize,
        position: usize,
        x: &[f32],
    ) -> Result<Vec<f32>, LlmError> {
        let network = self.network;
        let model = network.model();
        let (size, group) = (model.head_size as usize, (model.heads / model.kv_heads) as usize);
        let h = self.normed(x, &format!("blk.{layer}.attn_norm.weight"))?;
        let (variant, own) = (&model.variant, &model.layers[layer]);
        let (at, local) = (position..position + 1, own.turning == Turning::Local);
        let table = network.rope().table(self.context, at, local);
        let mut rows = Vec::with_capacity(3);
        for (name, tensor, heads) in [
            ("attn_q", Tensor::Q, model.heads),
            ("attn_k", Tensor::K, model.kv_heads),
            ("attn_v", Tensor::V, model.kv_heads),
        ] {
            let mut row = self.rows(tensor, layer, heads * model.head_size, &h)?;
            if network.model().biases {
                ops::add(&mut row, &self.vector(&format!("blk.{layer}.{name}.bias"))?);
            }
            if name != "attn_v" {
                if network.model().head_norms {
                    let norm = format!("blk.{layer}.{name}_norm.weight");
                    let width = if variant.row_norms { row.len() } else { size };
                    let heads: Result<Vec<_>, _> =
                        row.chunks(width).map(|part| self.normed(part, &norm)).collect();
                    row = heads?.concat();
                }
                if own.turning != Turning::None {
                    ops::rotate(&mut row, size, &table, network.rope().pairs);
                }
            }
            rows.push(row);
        }
        if let Some(noise) = &mut self.noise {
            rows[1..].iter_mut().for_each(|row| noise.halves(row));
        }
        let shape =
            KvShape { heads: model.kv_heads, head_size: model.head_size, quant: Quant::F16 };
        let cache = &mut self.caches[layer].blocks;
        let block = shape.block_bytes() as usize;
        let last = position / KV_BLOCK as usize * block;
        cache.resize(cache.len().max(last + block), 0);
        let [queries, keys, values] = &rows[..] else { unreachable!("three products") };
        ops::keep(shape, position, keys, values, &mut cache[last..last + block]);
        let table: Vec<u32> = (0..=(position as u64 / KV_BLOCK) as u32).collect();
        let sinks = match variant.sinks {
            true => self.vector(&format!("blk.{layer}.attn_sinks.weight"))?,
            false => Vec::new(),
        };
        let cache = &self.caches[layer].blocks;
        let mut out = vec![0.0; queries.len()];
        let heads = queries.chunks(size * group).zip(out.chunks_mut(size * group));
        for (head, (rows, out)) in heads.enumerate() {
            let scale = f32::from_bits(variant.score_scale(model.head_size));
            let queries = Queries {
                cap: variant.attention_cap.map_or(0.0, Number::get),
                window: own.window.unwrap_or(0) as usize,
                sinks: sinks.get(head * group..(head + 1) * group).unwrap_or(&[]),
                ..Queries::plain(rows, group, position, scale)
            };
            let view = KvView { cache, table: &table, shape, head };
            ops::attend(queries, view, &mut AttendScratch::default(), out);
        }
        Ok(out)
    }

    /// The second product of a pair: whole, or partial sums added in card order.
    fn second(
        &mut self,
        layer: usize,
        name: &str,
        x: Vec<f32>,
        columns: &dyn Fn(&Shard) -> Range<u64>,
    ) -> Result<Vec<f32>, LlmError> {
        let cuts: Vec<Range<u64>> = self.shards[layer].iter().map(columns).collect();
        let mut sum: Option<Vec<f32>> = None;
        for cut in &cuts {
            let own = &x[cut.start as usize..cut.end as usize];
            let part = match own.is_empty() {
                true => vec![0.0; self.network.model().hidden as usize],
                false => self.product(name, Some(Cut::Columns(cut.clone())), own)?,
            };
            match &mut sum {
                None => sum = Some(part),
                Some(sum) => ops::add(sum, &part),
            }
        }
        let mut sum = match sum {
            Some(sum) => sum,
            None => self.product(name, None, &x)?,
        };
        if let Some(noise) = &mut self.noise {
            let (tensor, _) = self.network.tensor(name)?;
            noise.sums(&mut sum, tensor.dims[0], tensor.quant);
        }
        Ok(sum)
    }

    fn add(&mut self, x: &mut [f32], more: &[f32]) {
        ops::add(x, more);
        if let Some(noise) = &mut self.noise {
            // The other neighbour of the sum, at most.
            x.iter_mut().for_each(|value| *value += *value * 2f32.powi(-23) * noise.next());
        }
    }

    /// Rows of a matrix, or columns of all its rows, times a row of activations.
    fn product(&mut self, name: &str, cut: Option<Cut>, x: &[f32]) -> Result<Vec<f32>, LlmError> {
        self.product_of(name, None, cut, x)
    }

    /// The same with one of the matrices that lie end to end in a tensor.
    fn product_of(
        &mut self,
        name: &str,
        expert: Option<u64>,
        cut: Option<Cut>,
        x: &[f32],
    ) -> Result<Vec<f32>, LlmError> {
        let network = self.network;
        let (tensor, range) = network.tensor(name)?;
        // One row may be stored as a vector.
        let mut rows = tensor.dims.get(1).copied().unwrap_or(1);
        let (quant, input) = (tensor.quant, tensor.quant.input());
        let mut columns = Vec::new();
        let weights = match cut {
            None => &network.bytes()[range],
            Some(Cut::Rows(own)) => {
                rows = own.end - own.start;
                &network.bytes()[network.rows_at(name, &own)?]
            }
            Some(cut) => {
                network.copy_part(name, &cut, &mut columns)?;
                &columns[..]
            }
        };
        let weights = match expert {
            None => weights,
            Some(expert) => {
                let each = rows as usize * weights.len() / (rows * tensor.dims[2]) as usize;
                &weights[expert as usize * each..][..each]
            }
        };
        let mut x = x.to_vec();
        if let Some(noise) = &mut self.noise {
            noise.blocks(&mut x, input);
        }
        let refused = |error| LlmError::unsupported(format!("tensor {name}: {error}"));
        let mut row = vec![0; input.row_bytes(x.len() as u64) as usize];
        quantize(input, &x, &mut row).map_err(refused)?;
        let mut inputs = Inputs::new();
        inputs.load(input, &row, 1, x.len()).map_err(refused)?;
        let mut out = vec![0.0; rows as usize];
        let width = weights.len() / out.len().max(1);
        let small = out.len() * x.len() < 1 << 21;
        let each = if small { out.len() } else { out.len().div_ceil(self.threads) }.max(1);
        let parts = out.chunks_mut(each).zip(weights.chunks((each * width).max(1)));
        let multiply = |(out, weights): (&mut [f32], &[u8])| {
            multiply(quant, weights, out.len(), &inputs, out).map_err(refused)
        };
        if small || self.threads == 1 {
            parts.into_iter().try_for_each(multiply)?;
            return Ok(out);
        }
        std::thread::scope(|scope| {
            let multiply = &multiply;
            let started: Vec<_> = parts.map(|part| scope.spawn(move || multiply(part))).collect();
            let panicked =
                || LlmError::unsupported(format!("tensor {name}: a thread has panicked"));
            started.into_iter().try_for_each(|part| part.join().map_err(|_| panicked())?)
        })?;
        Ok(out)
    }

    fn normed(&self, x: &[f32], weight: &str) -> Result<Vec<f32>, LlmError> {
        let mut out = vec![0.0; x.len()];
        ops::norm(x, &self.vector(weight)?, self.network.epsilon, &mut out);
        Ok(out)
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, LlmError> {
        let (_, range) = self.network.tensor(name)?;
        let words = self.network.bytes()[range].as_chunks().0.iter();
        Ok(words.map(|&word| f32::from_le_bytes(word)).collect())
    }

    fn embedding(&self, token: u64) -> Result<Vec<f32>, LlmError> {
        let name = "token_embd.weight";
        let (tensor, _) = self.network.tensor(name)?;
        let mut bytes = Vec::new();
        self.network.copy_part(name, &Cut::Rows(token..token + 1), &mut bytes)?;
        let mut out = vec![0.0; tensor.dims[0] as usize];
        let refused = |error| LlmError::unsupported(format!("tensor {name}: {error}"));
        decode(tensor.quant, &bytes, &mut out).map_err(refused)?;
        if let Some(scale) = self.network.model().variant.embedding_scale {
            ops::scale(&mut out, scale.get(), 0.0);
        }
        Ok(out)
    }
}

impl<B: AsRef<[u8]> + Sync> Evaluator<'_, B> {
    fn run(&mut self, part: &Part<'_>) -> Result<Output, LlmError> {
        let vocab = self.network.model().vocab;
        if let Some(&token) = part.tokens.iter().find(|&&token| u64::from(token) >= vocab) {
            return Err(LlmError::Token { token, vocab });
        }
        let mut x = Vec::new();
        for (at, &token) in part.tokens.iter().enumerate() {
            x = self.token(part.past as usize + at, u64::from(token))?;
        }
        let mut output = Output::default();
        match part.want {
            Want::Nothing => {}
            Want::Logits => output.logits = Some(self.logits(&x)?),
            Want::Best(k) => output.best = ops::best(&self.logits(&x)?, k as usize),
        }
        Ok(output)
    }
}

impl<B: AsRef<[u8]> + Sync> Runner for Evaluator<'_, B> {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        let begun = Instant::now();
        let &[part] = step.parts else {
            return Err(LlmError::unsupported("one sequence at a time on one card of the host"));
        };
        let outputs = vec![self.run(&part)?];
        let timing = Timing { wall: begun.elapsed(), ..Timing::default() };
        self.ended = Some(Outcome { outputs, timing, waits: Vec::new() });
        Ok(())
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        Ok(self.ended.take().unwrap_or_default())
    }

    fn batch(&self) -> usize {
        1
    }
}

/// Random numbers that move values within what a rounding may do to them.
#[derive(Debug)]
struct Noise {
    state: u64,
    parts: usize,
}

impl Noise {
    /// From -1/2 to 1/2 (SplitMix64).
    fn next(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    }

    /// Half a quantum up or down before a block is rounded: a value goes to one of its two neighbours. Plain
    /// numbers are not rounded here.
    fn blocks(&mut self, values: &mut [f32], input: Quant) {
        if input == Quant::F32 {
            return;
        }
        for block in values.chunks_mut(input.block() as usize) {
            let largest = block.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            let quantum = largest / 127.0;
            for value in block {
                // The scale is the largest value's, and that one is a multiple of it without rounding.
                if value.abs() < largest {
                    *value = (*value + quantum * self.next()).clamp(-largest, largest);
                }
            }
        }
    }

    /// Half a unit of the 11 bits that f16 has.
    fn halves(&mut self, values: &mut [f32]) {
        for value in values {
            let exponent = f32::from_bits(value.to_bits() & 0x7F80_0000);
            *value += exponent.max(2f32.powi(-14)) * 2f32.powi(-10) * self.next();
        }
    }

    /// What adding in another order can change: both orders round once for each block (plain numbers: for each of
    /// their 16 lanes' additions) and each part, each time by at most 2^-24 of a sum that is about as large as the
    /// row's results are. Errors of different additions are independent, so their squares add.
    fn sums(&mut self, sums: &mut [f32], columns: u64, quant: Quant) {
        let additions = match quant.block() {
            1 => columns.div_ceil(16) + 4,
            block => columns / block,
        };
        let squares: f64 = sums.iter().map(|sum| f64::from(*sum).powi(2)).sum();
        let typical = (squares / sums.len().max(1) as f64).sqrt() as f32;
        let count = 2.0 * (additions as f32 + self.parts as f32);
        let size = 2.0 * 2f32.powi(-24) * count.sqrt();
        for sum in sums {
            *sum += sum.abs().max(typical) * size * self.next();
        }
    }
}
