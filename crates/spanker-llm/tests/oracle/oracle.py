#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A second implementation of Llama-family models, for tests only: numpy, f32 and f64, one token row at a time.

It shares nothing with the Rust code: its own GGUF reader, its own block decoders, no blocks of activations.
"""
import struct

import numpy as np

BLOCK = {0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
         12: (256, 144), 13: (256, 176), 14: (256, 210), 20: (32, 18), 39: (32, 17)}

CURVE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


class Gguf:
    def __init__(self, path):
        self.data = np.memmap(path, dtype=np.uint8, mode="r")
        self.at = 0
        assert self.take(4).tobytes() == b"GGUF" and self.number("<I") in (2, 3)
        tensors, keys = self.number("<Q"), self.number("<Q")
        self.meta = {}
        for _ in range(keys):
            key = self.text()
            self.meta[key] = self.value(self.number("<I"))
        self.tensors = {}
        for _ in range(tensors):
            name = self.text()
            dims = [self.number("<Q") for _ in range(self.number("<I"))]
            self.tensors[name] = (dims, self.number("<I"), self.number("<Q"))
        align = self.meta.get("general.alignment", 32)
        self.start = (self.at + align - 1) // align * align

    def take(self, count):
        piece = self.data[self.at:self.at + count]
        self.at += count
        return piece

    def number(self, form):
        return struct.unpack(form, self.take(struct.calcsize(form)).tobytes())[0]

    def text(self):
        return self.take(self.number("<Q")).tobytes().decode("utf-8", "replace")

    def value(self, kind):
        forms = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.number("<I"), self.number("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.number(forms[kind])

    def weights(self, name):
        """A tensor as f32, rows first; None if it is not there."""
        if name not in self.tensors:
            return None
        dims, kind, offset = self.tensors[name]
        block, size = BLOCK[kind]
        count = int(np.prod(dims))
        start = self.start + offset
        raw = np.asarray(self.data[start:start + count // block * size]).reshape(-1, size)
        return decode(kind, raw).reshape([int(d) for d in dims[::-1]])


def half(raw, at):
    return raw[:, at:at + 2].copy().view("<f2").astype(np.float32)


def decode(kind, raw):
    if kind == 0:
        return raw.copy().view("<f4")
    if kind == 1:
        return raw.copy().view("<f2").astype(np.float32)
    if kind == 30:
        return (raw.copy().view("<u2").astype(np.uint32) << 16).view(np.float32)
    if kind == 8:
        return half(raw, 0) * raw[:, 2:].view(np.int8).astype(np.float32)
    if kind in (2, 3, 6, 7):
        at = {2: 2, 3: 4, 6: 6, 7: 8}[kind]
        low = np.concatenate([raw[:, at:] & 15, raw[:, at:] >> 4], axis=1).astype(np.int32)
        if kind in (6, 7):
            bits = raw[:, at - 4:at].copy().view("<u4")
            low |= (((bits >> np.arange(32, dtype=np.uint32)) & 1) << 4).astype(np.int32)
        if kind in (2, 6):
            return half(raw, 0) * (low - (8 if kind == 2 else 16)).astype(np.float32)
        return half(raw, 0) * low.astype(np.float32) + half(raw, 2)
    if kind in (20, 39):
        at = 2 if kind == 20 else 1
        places = np.concatenate([raw[:, at:] & 15, raw[:, at:] >> 4], axis=1)
        if kind == 20:
            return half(raw, 0) * CURVE[places]
        return (2.0 ** (raw[:, :1].astype(np.float64) - 127) * FLOAT4[places]).astype(np.float32)
    if kind in (12, 13):
        s = raw[:, 4:16].astype(np.int32)
        scale = np.concatenate([s[:, 0:4] & 63, (s[:, 8:12] & 15) | (s[:, 0:4] >> 6 << 4)], axis=1)
        least = np.concatenate([s[:, 4:8] & 63, (s[:, 8:12] >> 4) | (s[:, 4:8] >> 6 << 4)], axis=1)
        quants = raw[:, 16 if kind == 12 else 48:].reshape(-1, 4, 32).astype(np.int32)
        q = np.stack([quants & 15, quants >> 4], axis=2).reshape(-1, 8, 32)
        if kind == 13:
            q |= ((raw[:, None, 16:48].astype(np.int32) >> np.arange(8)[None, :, None]) & 1) << 4
        d, m = half(raw, 0)[:, :, None], half(raw, 2)[:, :, None]
        return (d * scale[:, :, None] * q - m * least[:, :, None]).astype(np.float32).reshape(len(raw), 256)
    low = raw[:, :128].reshape(-1, 2, 2, 32).astype(np.int32)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32).astype(np.int32)
    q = np.concatenate([low & 15, low >> 4], axis=2)
    q |= ((high >> np.array([0, 2, 4, 6])[None, None, :, None]) & 3) << 4
    scale = raw[:, 192:208].view(np.int8).astype(np.float32).repeat(16, axis=1)
    return half(raw, 208) * scale * (q.reshape(-1, 256) - 32)


class Oracle:
    def __init__(self, path):
        self.file = Gguf(path)
        meta = self.file.meta
        arch = meta["general.architecture"]
        key = lambda name, default=None: meta.get(f"{arch}.{name}", default)
        self.layers = key("block_count")
        self.heads = key("attention.head_count")
        self.kv_heads = key("attention.head_count_kv", self.heads)
        self.hidden = key("embedding_length")
        self.size = key("attention.key_length", self.hidden // self.heads)
        self.epsilon = key("attention.layer_norm_rms_epsilon", 1e-5)
        self.base = key("rope.freq_base", 10000.0)
        self.dims = key("rope.dimension_count", self.size)
        self.factor = key("rope.scaling.factor", 1.0) if key("rope.scaling.type") == "linear" else 1.0
        self.adjacent = arch == "llama"

    def norm(self, x, weight):
        mean = (x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True)
        return (x / np.sqrt(mean + self.epsilon) * weight).astype(np.float32)

    def rotate(self, x, positions):
        x = x.copy()
        angles = positions[:, None] / self.factor * self.base ** (-2.0 * np.arange(self.dims // 2) / self.dims)
        factors = self.file.weights("rope_freqs.weight")
        if factors is not None:
            angles = angles / factors
        cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
        if self.adjacent:
            one, two = slice(0, self.dims, 2), slice(1, self.dims, 2)
        else:
            one, two = slice(0, self.dims // 2), slice(self.dims // 2, self.dims)
        a, b = x[..., one].copy(), x[..., two].copy()
        x[..., one], x[..., two] = a * cos - b * sin, a * sin + b * cos
        return x.astype(np.float32)

    def project(self, x, name):
        out = x @ self.file.weights(name + ".weight").T
        bias = self.file.weights(name + ".bias")
        return out if bias is None else out + bias

    def layer(self, x, at, positions):
        """One layer on all rows; returns the rows after attention and after the whole layer."""
        name = lambda rest: f"blk.{at}.{rest}"
        rows = len(x)
        h = self.norm(x, self.file.weights(name("attn_norm.weight")))
        q = self.project(h, name("attn_q")).reshape(rows, self.heads, self.size)
        k = self.project(h, name("attn_k")).reshape(rows, self.kv_heads, self.size)
        v = self.project(h, name("attn_v")).reshape(rows, self.kv_heads, self.size)
        for which, weight in (("q", name("attn_q_norm.weight")), ("k", name("attn_k_norm.weight"))):
            weight = self.file.weights(weight)
            if weight is not None:
                q, k = (self.norm(q, weight), k) if which == "q" else (q, self.norm(k, weight))
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = (t.astype(np.float16).astype(np.float32) for t in (k, v))
        out = np.zeros_like(q)
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            scores = q[:, head] @ k[:, kv].T / np.sqrt(self.size)
            scores = np.where(np.tril(np.ones((rows, rows), bool)), scores, -np.inf)
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = shares / shares.sum(axis=1, keepdims=True) @ v[:, kv]
        x = x + self.project(out.reshape(rows, -1), name("attn_output"))
        after = x
        h = self.norm(x, self.file.weights(name("ffn_norm.weight")))
        gate, up = self.project(h, name("ffn_gate")), self.project(h, name("ffn_up"))
        return after, x + self.project(gate / (1 + np.exp(-gate)) * up, name("ffn_down"))

    def logits(self, tokens):
        """Logits after the last token."""
        x = self.file.weights("token_embd.weight")[np.array(tokens)]
        for at in range(self.layers):
            x = self.layer(x, at, np.arange(len(tokens)))[1]
        x = self.norm(x[-1], self.file.weights("output_norm.weight"))
        head = self.file.weights("output.weight")
        if head is None:
            head = self.file.weights("token_embd.weight")
        return head @ x
