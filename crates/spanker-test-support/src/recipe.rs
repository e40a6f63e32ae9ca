// SPDX-License-Identifier: Apache-2.0
//! Tiny models from a seed, as `crates/spanker-llm/tests/oracle/recipe.py` makes them: the same weights, written by another writer.

use std::io::Write;

use spanker_model::Quant;
use spanker_model::gguf::{Field, Writer};

/// What a tiny model is.
#[derive(Debug, Clone, serde::Deserialize)]
pub struct Recipe {
    /// What messages call it.
    pub name: String,
    /// As GGUF files name it.
    pub architecture: String,
    /// Blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Heads of queries.
    pub heads: u64,
    /// Heads of keys and values.
    pub kv_heads: u64,
    /// Numbers of a head.
    pub head_size: u64,
    /// Width between the feed-forward matrices.
    pub ffn: u64,
    /// Tokens.
    pub vocab: u64,
    /// The type of its matrices.
    pub quant: Quant,
    /// Whether the head is the embedding table.
    pub tied: bool,
    /// What its weights are made from.
    pub seed: u64,
    /// Numbers of a head that the rotary embedding turns, if not all.
    pub dims: Option<u64>,
    /// The base of the rotary embedding.
    pub base: f32,
    /// Whether there is a tensor of factors of angles.
    pub freqs: bool,
    /// A linear scale of positions.
    pub linear: Option<f32>,
    /// Whether the head shows the normed residual stream as it is.
    pub plain_head: bool,
    /// Experts of a layer, how many of them a token meets, and the width of the one that every token meets (0: none).
    #[serde(default)]
    pub mixture: Option<[u64; 3]>,
}

impl Recipe {
    /// A small Llama of one type, with a head of its own.
    pub fn llama(
        quant: Quant,
        [heads, kv_heads, head_size]: [u64; 3],
        hidden: u64,
        ffn: u64,
    ) -> Self {
        Recipe {
            name: format!("{quant}, {heads}/{kv_heads} heads of {head_size}, {hidden} x {ffn}"),
            architecture: "llama".into(),
            layers: 2,
            hidden,
            heads,
            kv_heads,
            head_size,
            ffn,
            vocab: 71,
            quant,
            tied: false,
            seed: 77,
            dims: None,
            base: 10_000.0,
            freqs: false,
            linear: None,
            plain_head: false,
            mixture: None,
        }
    }

    /// The same model with experts, each as wide as its feed-forward network is.
    pub fn mixture(self, architecture: &str, mixture: [u64; 3]) -> Self {
        let name = format!("{architecture} of {mixture:?} experts, {}", self.name);
        Recipe { name, architecture: architecture.into(), mixture: Some(mixture), ..self }
    }

    /// What a layer of a mixture has instead of a feed-forward network, and its router.
    fn experts(&self, [count, _, shared]: [u64; 3]) -> Vec<(&'static str, Vec<u64>, Quant)> {
        let (hidden, ffn, quant) = (self.hidden, self.ffn, self.quant);
        let mut list = vec![
            ("ffn_gate_inp.weight", vec![hidden, count], Quant::F32),
            ("ffn_gate_exps.weight", vec![hidden, ffn, count], quant),
            ("ffn_up_exps.weight", vec![hidden, ffn, count], quant),
            ("ffn_down_exps.weight", vec![ffn, hidden, count], quant),
        ];
        if shared > 0 {
            list.push(("ffn_gate_inp_shexp.weight", vec![hidden], Quant::F32));
            list.push(("ffn_gate_shexp.weight", vec![hidden, shared], quant));
            list.push(("ffn_up_shexp.weight", vec![hidden, shared], quant));
            list.push(("ffn_down_shexp.weight", vec![shared, hidden], quant));
        }
        list
    }

    /// Names, sizes (columns first) and types of all tensors, in the order of the file.
    pub fn tensors(&self) -> Vec<(String, Vec<u64>, Quant)> {
        let (q, kv) = (self.heads * self.head_size, self.kv_heads * self.head_size);
        let (hidden, ffn, quant) = (self.hidden, self.ffn, self.quant);
        let mut list = vec![("token_embd.weight".to_owned(), vec![hidden, self.vocab], quant)];
        if !self.tied {
            let head = if self.plain_head { Quant::F32 } else { quant };
            list.push(("output.weight".to_owned(), vec![hidden, self.vocab], head));
        }
        list.push(("output_norm.weight".to_owned(), vec![hidden], Quant::F32));
        for layer in 0..self.layers {
            let name = |rest: &str| format!("blk.{layer}.{rest}");
            for (matrix, cols, rows) in [
                ("attn_q", hidden, q),
                ("attn_k", hidden, kv),
                ("attn_v", hidden, kv),
                ("attn_output", q, hidden),
                ("ffn_gate", hidden, ffn),
                ("ffn_up", hidden, ffn),
                ("ffn_down", ffn, hidden),
            ] {
                if self.mixture.is_some() && matrix.starts_with("ffn") {
                    continue;
                }
                list.push((name(&format!("{matrix}.weight")), vec![cols, rows], quant));
            }
            for (rest, dims, quant) in self.mixture.map(|of| self.experts(of)).unwrap_or_default() {
                list.push((name(rest), dims, quant));
            }
            for norm in ["attn_norm.weight", "ffn_norm.weight"] {
                list.push((name(norm), vec![hidden], Quant::F32));
            }
            if self.architecture.starts_with("qwen2") {
                for (bias, rows) in [("attn_q.bias", q), ("attn_k.bias", kv), ("attn_v.bias", kv)] {
                    list.push((name(bias), vec![rows], Quant::F32));
                }
            }
            if self.architecture.starts_with("qwen3") {
                for norm in ["attn_q_norm.weight", "attn_k_norm.weight"] {
                    list.push((name(norm), vec![self.head_size], Quant::F32));
                }
            }
        }
        if self.freqs {
            let turns = self.dims.unwrap_or(self.head_size) / 2;
            list.push(("rope_freqs.weight".to_owned(), vec![turns], Quant::F32));
        }
        list
    }

    /// The bytes of a tensor.
    pub fn data(&self, at: usize, name: &str, dims: &[u64], quant: Quant) -> Vec<u8> {
        let count = dims.iter().product::<u64>() as usize;
        let bytes = |value: &dyn Fn(usize) -> f32| -> Vec<u8> {
            (0..count).flat_map(|index| value(index).to_le_bytes()).collect()
        };
        if self.plain_head && name == "output.weight" {
            let width = dims[0] as usize;
            return bytes(&|index| f32::from(index / width == index % width));
        }
        if self.plain_head && name == "output_norm.weight" {
            return bytes(&|_| 1.0);
        }
        if quant != Quant::F32 {
            return blocks(quant, dims[0], self.seed, at, count / quant.block() as usize);
        }
        let part = |index| (word(self.seed, at, index) >> 40) as f32 / (1u64 << 24) as f32;
        if name == "rope_freqs.weight" {
            bytes(&|index| part(index) * 7.0 + 1.0)
        } else if name.ends_with(".bias") {
            bytes(&|index| part(index) - 0.5)
        } else if dims.len() == 1 {
            bytes(&|index| (part(index) - 0.5) * 0.5 + 1.0)
        } else {
            let size = 4.0 / 2f32.powi(steps(dims[0]) as i32);
            bytes(&|index| (part(index) - 0.5) * size)
        }
    }

    /// FNV-1a of all weights.
    pub fn checksum(&self) -> u64 {
        let tensors = self.tensors().into_iter().enumerate();
        let bytes =
            tensors.flat_map(|(at, (name, dims, quant))| self.data(at, &name, &dims, quant));
        bytes.fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// The model's file.
    pub fn file(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        let arch = &self.architecture;
        writer.put("general.architecture", Field::Text(arch)).expect("a key");
        let mut put = |key: &str, field: Field<'_>| {
            writer.put(&format!("{arch}.{key}"), field).expect("a key");
        };
        for (key, size) in [
            ("block_count", self.layers as u64),
            ("context_length", 256),
            ("embedding_length", self.hidden),
            ("feed_forward_length", self.ffn),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_size),
            ("attention.value_length", self.head_size),
            ("rope.dimension_count", self.dims.unwrap_or(self.head_size)),
        ] {
            put(key, Field::U32(size as u32));
        }
        if let Some([experts, used, shared]) = self.mixture {
            put("expert_count", Field::U32(experts as u32));
            put("expert_used_count", Field::U32(used as u32));
            put("expert_feed_forward_length", Field::U32(self.ffn as u32));
            if shared > 0 {
                put("expert_shared_feed_forward_length", Field::U32(shared as u32));
            }
        }
        put("attention.layer_norm_rms_epsilon", Field::F32(1e-5));
        put("rope.freq_base", Field::F32(self.base));
        if let Some(factor) = self.linear {
            put("rope.scaling.type", Field::Text("linear"));
            put("rope.scaling.factor", Field::F32(factor));
        }
        let tensors = self.tensors();
        for (name, dims, quant) in &tensors {
            writer.tensor(name, dims, *quant).expect("a tensor");
        }
        let mut file = Vec::new();
        let weights = |at: usize, out: &mut dyn Write| {
            let (name, dims, quant) = &tensors[at];
            out.write_all(&self.data(at, name, dims, *quant))
        };
        writer.write(&mut file, weights).expect("memory");
        file
    }
}

/// A word of a tensor: splitmix64 of a place that belongs to one tensor of one model.
fn word(seed: u64, tensor: usize, index: usize) -> u64 {
    let first = (seed * 1000 + tensor as u64) << 32;
    let z = first.wrapping_add((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The least power of two that is no less than the root of a row's length.
fn steps(cols: u64) -> u16 {
    (0..).find(|&exponent| 4u64.pow(u32::from(exponent)) >= cols).expect("rows end")
}

/// Random blocks whose scales give rows of about unit length.
fn blocks(quant: Quant, cols: u64, seed: u64, tensor: usize, count: usize) -> Vec<u8> {
    let width = quant.block_bytes() as usize;
    let words = (0..(count * width).div_ceil(8)).map(|index| word(seed, tensor, index));
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).take(count * width).collect();
    bytes.chunks_exact_mut(width).for_each(|block| scale(quant, steps(cols), block));
    bytes
}

/// Replaces the scales of a block of random bytes.
fn scale(quant: Quant, e: u16, block: &mut [u8]) {
    fn put(block: &mut [u8], at: usize, bits: u16) {
        block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }
    fn signed(block: &mut [u8], at: usize, exponent: u16) {
        let bits = u16::from_le_bytes([block[at], block[at + 1]]);
        put(block, at, (bits & 0x83ff) | exponent << 10);
    }
    match quant {
        Quant::F16 => signed(block, 0, 15 - e),
        Quant::Bf16 => {
            let bits = u16::from_le_bytes([block[0], block[1]]);
            put(block, 0, (bits & 0x807f) | (127 - e) << 7);
        }
        Quant::Q4_0 => signed(block, 0, 15 - e - 2),
        Quant::Q5_0 => signed(block, 0, 15 - e - 3),
        Quant::Q8_0 | Quant::Iq4Nl => signed(block, 0, 15 - e - 6),
        Quant::Mxfp4 => block[0] = (126 - e) as u8,
        Quant::Q4_1 | Quant::Q5_1 => {
            // The minimum is -7.5 or -15.5 times the scale.
            let (less, mantissa) = if quant == Quant::Q4_1 { (2, 0x380) } else { (3, 0x3c0) };
            put(block, 0, (15 - e - less) << 10);
            put(block, 2, 0x8000 | (15 - e) << 10 | mantissa);
        }
        Quant::Q4K | Quant::Q5K => {
            let (less, mantissa) = if quant == Quant::Q4K { (8, 0x380) } else { (9, 0x3c0) };
            put(block, 0, (15 - e - less) << 10);
            put(block, 2, (15 - e - 6) << 10 | mantissa);
            for at in 4..8 {
                block[at] |= 0xa0;
                block[at + 4] = block[at];
                let low = block[at + 8] & 15;
                block[at + 8] = low | low << 4;
            }
        }
        Quant::Q2K => {
            // Each minimum is its scale's.
            block[..16].iter_mut().for_each(|byte| *byte = (*byte & 15) * 17);
            put(block, 80, (15 - e - 3) << 10);
            put(block, 82, (15 - e - 3) << 10 | 0x200);
        }
        Quant::Q3K => signed(block, 108, 15 - e - 5),
        Quant::Iq4Xs => signed(block, 0, (15 - e).saturating_sub(10)),
        Quant::Iq2Xxs | Quant::Iq2Xs => signed(block, 0, 15 - e - 6),
        Quant::Iq3Xxs => signed(block, 0, 15 - e - 7),
        Quant::Tq1_0 => signed(block, 52, 15 - e),
        Quant::Tq2_0 => signed(block, 64, 15 - e),
        Quant::Q6K => {
            for byte in &mut block[192..208] {
                let size = (*byte & 0x1f) | 0x20;
                *byte = if *byte & 0x80 == 0 { size } else { size.wrapping_neg() };
            }
            signed(block, 208, 15 - e - 9);
        }
        other => panic!("no recipe for {other}"),
    }
}
