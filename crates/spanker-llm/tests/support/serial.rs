// SPDX-License-Identifier: Apache-2.0
//! A model token by token and layer by layer, by the kernels alone: no programs, no cards, no threads. Where a
//! second product of a pair is split by columns, the parts are added in the order of the shards.

use ggml_spanker::ops::{self, AttendScratch, Look};
use ggml_spanker::{Inputs, decode, multiply, quantize};
use spanker_llm::{Cut, Network, Piece};
use spanker_plan::Shard;

/// The small number in norms of all recipes.
const EPSILON: f32 = 1e-5;

/// Keys and values of one layer, as f16.
#[derive(Default, Clone)]
struct Cache {
    keys: Vec<u8>,
    values: Vec<u8>,
}

/// A model on the way through a sequence.
pub struct Serial<'a> {
    network: &'a Network<Vec<u8>>,
    /// Who has which columns; nobody if columns are not split.
    shards: &'a [Shard],
    caches: Vec<Cache>,
}

impl<'a> Serial<'a> {
    pub fn new(network: &'a Network<Vec<u8>>, shards: &'a [Shard]) -> Self {
        let caches = vec![Cache::default(); network.model().layers.len()];
        Serial { network, shards, caches }
    }

    /// Logits after each token.
    pub fn logits(mut self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let tokens = tokens.iter().enumerate();
        tokens.map(|(position, token)| self.token(position, u64::from(*token))).collect()
    }

    fn token(&mut self, position: usize, token: u64) -> Vec<f32> {
        let model = self.network.model();
        let mut x = self.numbers("token_embd.weight", token..token + 1);
        for layer in 0..model.layers.len() {
            let heads = self.attention(layer, position, &x);
            let size = model.head_size;
            let columns = |shard: &Shard| shard.heads.start * size..shard.heads.end * size;
            let o = self.second(&format!("blk.{layer}.attn_output.weight"), &heads, &columns);
            ops::add(&mut x, &o);
            let h = self.normed(&x, &format!("blk.{layer}.ffn_norm.weight"));
            let gate = self.product(&format!("blk.{layer}.ffn_gate.weight"), None, &h);
            let up = self.product(&format!("blk.{layer}.ffn_up.weight"), None, &h);
            let mut opened = vec![0.0; gate.len()];
            ops::gate(&gate, &up, &mut opened);
            let name = format!("blk.{layer}.ffn_down.weight");
            let down = self.second(&name, &opened, &|shard| shard.ffn.clone());
            ops::add(&mut x, &down);
        }
        let h = self.normed(&x, "output_norm.weight");
        let head = if model.tied { "token_embd.weight" } else { "output.weight" };
        self.product(head, None, &h)
    }

    /// What the heads find.
    fn attention(&mut self, layer: usize, position: usize, x: &[f32]) -> Vec<f32> {
        let model = self.network.model();
        let (size, group) = (model.head_size as usize, (model.heads / model.kv_heads) as usize);
        let h = self.normed(x, &format!("blk.{layer}.attn_norm.weight"));
        let rope = self.network.rope();
        let table = rope.table(position..position + 1);
        let [q, k, v] = ["attn_q", "attn_k", "attn_v"].map(|name| {
            let mut row = self.product(&format!("blk.{layer}.{name}.weight"), None, &h);
            let bias = format!("blk.{layer}.{name}.bias");
            if self.network.header().tensors().contains_key(&bias) {
                ops::add(&mut row, &self.vector(&bias));
            }
            let norm = format!("blk.{layer}.{name}_norm.weight");
            if self.network.header().tensors().contains_key(&norm) {
                let heads = row.chunks(size);
                row = heads.flat_map(|head| self.normed(head, &norm)).collect();
            }
            if name != "attn_v" {
                ops::rotate(&mut row, size, &table, rope.pairs);
            }
            row
        });
        let cache = &mut self.caches[layer];
        for (row, kept) in [(&k, &mut cache.keys), (&v, &mut cache.values)] {
            let mut halves = vec![0; row.len() * 2];
            ops::to_half(row, &mut halves);
            kept.extend(halves);
        }
        let mut out = vec![0.0; q.len()];
        let both = q.chunks(size * group).zip(out.chunks_mut(size * group));
        for (kv, (queries, out)) in both.enumerate() {
            let look = Look {
                keys: &cache.keys[kv * size * 2..],
                values: &cache.values[kv * size * 2..],
                stride: k.len() * 2,
                positions: position + 1,
                scale: 1.0 / (size as f32).sqrt(),
            };
            ops::attend(queries, size, look, &mut AttendScratch::default(), out);
        }
        out
    }

    /// The second product of a pair: whole, or parts added one after the other.
    fn second(
        &self,
        name: &str,
        x: &[f32],
        columns: &dyn Fn(&Shard) -> std::ops::Range<u64>,
    ) -> Vec<f32> {
        let part = |shard: &Shard| {
            let cut = columns(shard);
            let own = &x[cut.start as usize..cut.end as usize];
            match own.is_empty() {
                true => vec![0.0; self.network.model().hidden as usize],
                false => self.product(name, Some(Cut::Columns(cut)), own),
            }
        };
        let mut parts = self.shards.iter().map(part);
        let Some(mut sum) = parts.next() else { return self.product(name, None, x) };
        for part in parts {
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        sum
    }

    fn product(&self, name: &str, cut: Option<Cut>, x: &[f32]) -> Vec<f32> {
        let tensor = &self.network.header().tensors()[name];
        let (rows, input) = (tensor.dims[1], tensor.quant.input());
        let mut weights = Vec::new();
        let cut = cut.unwrap_or(Cut::Rows(0..rows));
        let piece = Piece { tensor: name.to_owned(), cut };
        self.network.copy_piece(&piece, &mut weights).expect("a piece");
        let mut row = vec![0; input.row_bytes(x.len() as u64) as usize];
        quantize(input, x, &mut row).expect("whole blocks");
        let mut inputs = Inputs::new();
        inputs.load(input, &row, 1, x.len()).expect("a row");
        let mut out = vec![0.0; rows as usize];
        multiply(tensor.quant, &weights, rows as usize, &inputs, &mut out).expect("a product");
        out
    }

    fn normed(&self, x: &[f32], weight: &str) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        ops::norm(x, &self.vector(weight), EPSILON, &mut out);
        out
    }

    fn vector(&self, name: &str) -> Vec<f32> {
        let elements = self.network.header().tensors()[name].dims[0];
        let mut bytes = Vec::new();
        let piece = Piece { tensor: name.to_owned(), cut: Cut::Rows(0..elements) };
        self.network.copy_piece(&piece, &mut bytes).expect("a piece");
        bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
    }

    /// Rows of a matrix as numbers.
    fn numbers(&self, name: &str, rows: std::ops::Range<u64>) -> Vec<f32> {
        let tensor = &self.network.header().tensors()[name];
        let mut out = vec![0.0; ((rows.end - rows.start) * tensor.dims[0]) as usize];
        let mut bytes = Vec::new();
        let piece = Piece { tensor: name.to_owned(), cut: Cut::Rows(rows) };
        self.network.copy_piece(&piece, &mut bytes).expect("a piece");
        decode(tensor.quant, &bytes, &mut out).expect("whole blocks");
        out
    }
}
