#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""OLMoE in numpy with f64 activations, which shares no code with the kernels: makes the line of ../vectors/families.json
that llama.cpp does not read, because its heads are not as wide together as the model.

    python olmoe.py FILE HEADS KV_HEADS USED TOKEN..

prints the most likely token and the first 32 logits. It needs PyPI's `gguf`.
"""

import json
import sys

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize


class Olmoe:
    def __init__(self, path, heads, kv_heads, used):
        self.heads, self.kv_heads, self.used = heads, kv_heads, used
        self.weights = {}
        for tensor in GGUFReader(path).tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            shape = [int(size) for size in tensor.shape][::-1]
            self.weights[tensor.name.removesuffix(".weight")] = values.reshape(shape)

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.weights[name]

    @staticmethod
    def turned(x):
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        one, two = x[..., :half], x[..., half:]
        return np.concatenate([one * cos - two * sin, one * sin + two * cos], -1)

    def attention(self, x, layer):
        name = lambda rest: f"blk.{layer}.{rest}"
        h, count = self.norm(x, name("attn_norm")), len(x)
        rows = [h @ self.weights[name(f"attn_{part}")].T for part in "qkv"]
        # Whole rows, before they are heads.
        rows[0], rows[1] = self.norm(rows[0], name("attn_q_norm")), self.norm(rows[1], name("attn_k_norm"))
        q, k, v = (row.reshape(count, heads, -1) for row, heads in zip(rows, [self.heads] + 2 * [self.kv_heads]))
        group = self.heads // self.kv_heads
        q, k, v = self.turned(q), np.repeat(self.turned(k), group, 1), np.repeat(v, group, 1)
        scores = np.einsum("thd,uhd->htu", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tril(np.ones((count, count))) > 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("htu,uhd->thd", weights, v).reshape(count, -1) @ self.weights[name("attn_output")].T

    def experts(self, x, layer):
        name = lambda rest: f"blk.{layer}.{rest}"
        h, out = self.norm(x, name("ffn_norm")), np.zeros_like(x)
        logits = h @ self.weights[name("ffn_gate_inp")].T
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        gates, ups, downs = (self.weights[name(f"ffn_{part}_exps")] for part in ("gate", "up", "down"))
        for row, all_logits in enumerate(logits):
            for expert in np.argsort(-all_logits, kind="stable")[: self.used]:
                gate, up = gates[expert] @ h[row], ups[expert] @ h[row]
                gated = gate / (1 + np.exp(-gate)) * up
                out[row] += shares[row, expert] * (downs[expert] @ gated)
        return out

    def logits(self, tokens):
        x, layer = self.weights["token_embd"][tokens], 0
        while f"blk.{layer}.attn_q" in self.weights:
            x = x + self.attention(x, layer)
            x, layer = x + self.experts(x, layer), layer + 1
        head = self.weights.get("output", self.weights["token_embd"])
        return self.norm(x[-1], "output_norm") @ head.T


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    numbers = [int(number) for number in numbers]
    found = Olmoe(path, *numbers[:3]).logits(numbers[3:])
    print(json.dumps({"next": int(found.argmax()), "logits": [round(float(x), 5) for x in found[:32]]}))
