// SPDX-License-Identifier: Apache-2.0
//! GGUF files of a small Llama, right and wrong ones. The weights are zeros.

/// A GGUF header of a small Llama, with the size that the whole file would have.
pub struct Gguf {
    pub layers: u32,
    pub heads: u32,
    /// A tensor to leave out.
    pub without: &'static str,
}

impl Gguf {
    pub const GOOD: Gguf = Gguf { layers: 2, heads: 4, without: "" };

    pub fn tensors(&self) -> Vec<(String, Vec<u64>, u32, u64)> {
        let (hidden, kv, ffn, vocab) = (64u64, 32u64, 128u64, 256u64);
        let mut tensors = vec![("token_embd.weight".to_owned(), vec![hidden, vocab], 2)];
        for layer in 0..self.layers {
            for (name, cols, rows) in [
                ("attn_q", hidden, hidden),
                ("attn_k", hidden, kv),
                ("attn_v", hidden, kv),
                ("attn_output", hidden, hidden),
                ("ffn_gate", hidden, ffn),
                ("ffn_up", hidden, ffn),
                ("ffn_down", ffn, hidden),
            ] {
                tensors.push((format!("blk.{layer}.{name}.weight"), vec![cols, rows], 2));
            }
            for norm in ["attn_norm", "ffn_norm"] {
                tensors.push((format!("blk.{layer}.{norm}.weight"), vec![hidden], 0));
            }
        }
        tensors.push(("output_norm.weight".to_owned(), vec![hidden], 0));
        tensors.retain(|(name, _, _)| self.without.is_empty() || !name.contains(self.without));
        let sized = tensors.into_iter().map(|(name, dims, id)| {
            let elements: u64 = dims.iter().product();
            let bytes = if id == 2 { elements / 32 * 18 } else { elements * 4 };
            (name, dims, id, bytes)
        });
        sized.collect()
    }

    pub fn bytes(&self) -> Vec<u8> {
        let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let name = [text("general.name"), 8u32.to_le_bytes().to_vec(), text("tiny")].concat();
        let kind =
            [text("general.architecture"), 8u32.to_le_bytes().to_vec(), text("llama")].concat();
        let mut metadata = vec![name, kind];
        for (key, value) in [
            ("block_count", self.layers),
            ("embedding_length", 64),
            ("feed_forward_length", 128),
            ("context_length", 2048),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", 2),
        ] {
            let number = [4u32.to_le_bytes(), value.to_le_bytes()].concat();
            metadata.push([text(&format!("llama.{key}")), number].concat());
        }
        let tensors = self.tensors();
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend((tensors.len() as u64).to_le_bytes());
        bytes.extend((metadata.len() as u64).to_le_bytes());
        bytes.extend(metadata.concat());
        let mut offset = 0u64;
        for (name, dims, id, size) in tensors {
            bytes.extend(text(&name));
            bytes.extend((dims.len() as u32).to_le_bytes());
            bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
            bytes.extend(id.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
            offset = (offset + size).next_multiple_of(32);
        }
        bytes.resize(bytes.len().next_multiple_of(32) + offset as usize, 0);
        bytes
    }
}
