#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the vectors in `../vectors` with numpy alone: operators, blocks, and whole models.

It is not part of the build: the vectors are kept in the repository, and this script says where they came from.
Another run writes the same bytes, up to the last digits that numpy's products have on another processor.

    pip install numpy
    python make_vectors.py
"""
import json
import tempfile
from pathlib import Path

import numpy as np

import recipe
from oracle import BLOCK, Oracle, decode

SEED = 20260301
OUT = Path(__file__).parent.parent / "vectors"


def floats(values):
    return np.asarray(values).astype("<f4").tobytes().hex()


def doubles(values):
    return [float(value) for value in np.asarray(values).reshape(-1)]


def operators(rng):
    """Inputs as f32, results as f64 computed from these very inputs."""
    f32 = lambda *shape: rng.normal(size=shape).astype(np.float32)
    out = {}
    rows = []
    for width, size in ((1, 1.0), (40, 1.0), (67, 1e-3), (256, 30.0)):
        row, weight = f32(width) * np.float32(size), f32(width)
        wide = row.astype(np.float64)
        normed = wide / np.sqrt((wide ** 2).mean() + np.float64(np.float32(1e-5))) * weight
        rows.append(dict(row=floats(row), weight=floats(weight), out=doubles(normed)))
    out["norm"] = rows
    rows = []
    for pairs in ("adjacent", "halves"):
        for size, dims, heads in ((8, 8, 3), (20, 20, 2), (20, 12, 2), (64, 64, 1)):
            row = f32(heads, size)
            angles = (rng.uniform(0, 100) * 1e4 ** (-2 * np.arange(dims // 2) / dims))
            table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
            turned = row.astype(np.float64)
            for pair, (cos, sin) in enumerate(table.astype(np.float64)):
                one, two = (2 * pair, 2 * pair + 1) if pairs == "adjacent" else (pair, pair + dims // 2)
                for head in range(heads):
                    a, b = float(row[head, one]), float(row[head, two])
                    turned[head, one], turned[head, two] = a * cos - b * sin, a * sin + b * cos
            rows.append(dict(pairs=pairs, head_size=size, row=floats(row), table=floats(table), out=doubles(turned)))
    out["rotate"] = rows
    rows = []
    for heads, kv, size, positions in ((6, 2, 20, 9), (4, 4, 8, 1), (9, 3, 32, 33)):
        queries = f32(heads, size)
        keys, values = f32(positions, kv, size).astype(np.float16), f32(positions, kv, size).astype(np.float16)
        scale = np.float32(1 / np.sqrt(size))
        found = np.zeros((heads, size))
        for head in range(heads):
            at = head // (heads // kv)
            scores = keys[:, at].astype(np.float64) @ queries[head].astype(np.float64) * np.float64(scale)
            shares = np.exp(scores - scores.max())
            found[head] = shares / shares.sum() @ values[:, at].astype(np.float64)
        rows.append(dict(heads=heads, kv_heads=kv, head_size=size, positions=positions, scale=float(scale),
                         queries=floats(queries), keys=keys.tobytes().hex(), values=values.tobytes().hex(),
                         out=doubles(found)))
    out["attend"] = rows
    # Shares of the scores: keys have them as their only number, values are rows of the identity.
    rows = []
    for scores in (rng.normal(size=32) * 4, np.zeros(7), np.array([-60.0, 60.0, 59.0]), np.linspace(-20, 0, 31)):
        scores = scores.astype(np.float16)
        wide = scores.astype(np.float64)
        shares = np.exp(wide - wide.max())
        rows.append(dict(scores=scores.tobytes().hex(), out=doubles(shares / shares.sum())))
    out["softmax"] = rows
    gate, up = np.concatenate([f32(60) * 4, np.float32([0, -0.0, -87, 87, -200, 200, 1e-8])]), f32(67)
    wide = gate.astype(np.float64)
    out["gate"] = dict(gate=floats(gate), up=floats(up), out=doubles(wide / (1 + np.exp(-wide)) * up))
    x = np.concatenate([np.linspace(-87.3, 88.7, 100), rng.uniform(-1, 1, 50)]).astype(np.float32)
    out["exp"] = dict(x=floats(x), out=doubles(np.exp(x.astype(np.float64))))
    return out


def scaled(quant, rng, count):
    """Random blocks whose scales are numbers of a sensible size."""
    width = BLOCK[recipe.KIND[quant]][1]
    raw = rng.integers(0, 256, size=(count, width), dtype=np.uint8)
    half = lambda low, high: rng.uniform(low, high, (count, 1)).astype("<f2").view(np.uint8)
    if quant == "f32":
        return rng.normal(size=(count, 1)).astype("<f4").view(np.uint8)
    if quant == "f16":
        return rng.normal(size=(count, 1)).astype("<f2").view(np.uint8)
    if quant == "bf16":
        return (rng.normal(size=(count, 1)).astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    if quant == "mxfp4":
        raw[:, 0] = rng.integers(118, 126, size=count)
        return raw
    at = 208 if quant == "q6_k" else 0
    raw[:, at:at + 2] = half(-0.1, 0.1)
    if quant in ("q4_1", "q5_1", "q4_k", "q5_k"):
        raw[:, 2:4] = half(-0.1, 0.1)
    return raw


def weights(rng):
    """Blocks of every type, what they decode to, and their products with two rows of activations: one that 8 bits
    hold exactly, one that they round."""
    cols, rows = 512, 3
    exact = rng.integers(-127, 128, size=cols)
    exact[::32] = 127
    exact = (exact / 32.0).astype(np.float32)
    rounded = rng.normal(size=cols).astype(np.float32)
    types = []
    for quant, kind in recipe.KIND.items():
        block = BLOCK[kind][0]
        raw = scaled(quant, rng, rows * cols // block)
        values = decode(kind, raw).reshape(rows, cols)
        products = np.stack([exact, rounded]).astype(np.float64) @ values.astype(np.float64).T
        shown = max(2 * block, 64) // block
        types.append(dict(quant=quant, blocks=raw.tobytes().hex(), decoded=floats(values.reshape(-1)[:shown * block]),
                          sum=float(values.astype(np.float64).sum()), products=doubles(products)))
    return dict(cols=cols, rows=rows, activations=[floats(exact), floats(rounded)], types=types)


MODELS = [
    dict(name="llama, grouped heads, tied head", seed=1),
    dict(name="llama, head size 20, one key head, own head", hidden=40, heads=3, kv_heads=1, head_size=20, ffn=50,
         tied=False, seed=2),
    dict(name="llama, one layer", layers=1, seed=3),
    dict(name="llama, three layers", layers=3, seed=3),
    dict(name="residual stream after one layer", layers=1, vocab=32, tied=False, plain_head=True, seed=4),
    dict(name="residual stream after two layers", layers=2, vocab=32, tied=False, plain_head=True, seed=4),
    dict(name="residual stream after three layers", layers=3, vocab=32, tied=False, plain_head=True, seed=4),
    dict(name="qwen2, biases, halves", architecture="qwen2", base=1e6, seed=5),
    dict(name="qwen2, partly turned heads", architecture="qwen2", head_size=20, dims=12, hidden=40, seed=6),
    dict(name="qwen3, normed heads", architecture="qwen3", head_size=12, seed=7),
    dict(name="llama 3, rope_freqs", freqs=True, base=5e5, seed=8),
    dict(name="llama, linear scaling", linear=4.0, seed=9),
    dict(name="llama, partly turned heads", head_size=20, dims=12, hidden=40, seed=10),
    dict(name="llama, f16", quant="f16", seed=11),
    dict(name="llama, bf16", quant="bf16", seed=12),
] + [
    dict(name=f"llama, {quant}", quant=quant, hidden=64, heads=4, kv_heads=2, head_size=16, ffn=96, seed=20 + at)
    for at, quant in enumerate(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"))
] + [
    dict(name=f"llama, {quant}", quant=quant, hidden=256, heads=4, kv_heads=2, head_size=64, ffn=256, layers=1,
         seed=30 + at) for at, quant in enumerate(("q4_k", "q5_k", "q6_k"))
] + [
    dict(name="qwen2, q4_0, head size 24", architecture="qwen2", quant="q4_0", hidden=96, heads=4, kv_heads=2,
         head_size=24, ffn=64, tied=False, seed=40),
] + [
    dict(name=f"llama, {quant}", quant=quant, hidden=64, heads=4, kv_heads=2, head_size=16, ffn=96, seed=50 + at)
    for at, quant in enumerate(("iq4_nl", "mxfp4"))
]


class Rounded(Oracle):
    """The same model with activations rounded to 8 bits in blocks before they meet weights that are blocks."""

    def rounded(self, x, name):
        block = BLOCK[self.file.tensors[name][1]][0]
        if block == 1:
            return x
        rows = x.reshape(-1, block).astype(np.float32)
        most = np.abs(rows).max(axis=1, keepdims=True)
        whole = np.rint(rows * (np.float32(127) / np.where(most > 0, most, 1)))
        scale = most / np.float32(127)
        if block == 32:
            scale = scale.astype(np.float16).astype(np.float32)
        return (whole * scale).reshape(x.shape)

    def project(self, x, name):
        return super().project(self.rounded(x, name + ".weight"), name)

    def logits(self, tokens):
        x = self.file.weights("token_embd.weight")[np.array(tokens)]
        for at in range(self.layers):
            x = self.layer(x, at, np.arange(len(tokens)))[1]
        x = self.norm(x[-1], self.file.weights("output_norm.weight"))
        name = "output.weight" if "output.weight" in self.file.tensors else "token_embd.weight"
        return self.file.weights(name) @ self.rounded(x, name)


def models(rng):
    listed = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for model in MODELS:
            recipe.write(model, path)
            oracle, rounded = Oracle(path), Rounded(path)
            quantised = model.get("quant", "f32") not in ("f32", "f16", "bf16")
            cases = []
            for length in (1, 3, 19):
                tokens = [int(token) for token in rng.integers(0, {**recipe.USUAL, **model}["vocab"], size=length)]
                case = dict(tokens=tokens, logits=floats(oracle.logits(tokens)))
                if quantised:
                    case["rounded"] = floats(rounded.logits(tokens))
                cases.append(case)
            shown = {**recipe.USUAL, **model}
            listed.append(dict(recipe=shown, checksum=f"{recipe.checksum(model):016x}", cases=cases))
    return listed


def save(name, value):
    text = json.dumps(value, indent=0, separators=(",", ":"))
    (OUT / name).write_text(text + "\n")
    print(f"{name}: {len(text) + 1} bytes")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    save("operators.json", operators(np.random.default_rng(SEED)))
    save("weights.json", weights(np.random.default_rng(SEED + 1)))
    save("models.json", models(np.random.default_rng(SEED + 2)))
