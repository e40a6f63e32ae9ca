#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tiny models from a seed, as `crates/spanker-test-support/src/recipe.rs` makes them, written by a GGUF writer of their own."""
import struct

import numpy as np

from oracle import BLOCK

KIND = {"f32": 0, "f16": 1, "bf16": 30, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q4_k": 12,
        "q5_k": 13, "q6_k": 14, "iq4_nl": 20, "mxfp4": 39}

USUAL = dict(name="", architecture="llama", layers=2, hidden=32, heads=4, kv_heads=2, head_size=8, ffn=48, vocab=48,
             quant="f32", tied=True, seed=1, dims=None, base=10000.0, freqs=False, linear=None, plain_head=False)


def words(seed, tensor, count):
    """Whole 64-bit words: splitmix64 of a place that belongs to one tensor of one model."""
    with np.errstate(over="ignore"):
        first = np.uint64((seed * 1000 + tensor) << 32)
        z = first + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def parts(seed, tensor, count):
    """Numbers from 0 to 1."""
    return (words(seed, tensor, count) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)


def steps(cols):
    """The least power of two that is no less than the root of a row's length."""
    exponent = 0
    while 4 ** exponent < cols:
        exponent += 1
    return exponent


def blocks(quant, cols, seed, tensor, count):
    """Random blocks whose scales give rows of about unit length."""
    size, width = BLOCK[KIND[quant]]
    raw = words(seed, tensor, (count * width + 7) // 8).astype("<u8").view(np.uint8)[:count * width]
    raw = raw.reshape(count, width).copy()
    e = steps(cols)

    def signed(at, less):
        pair = raw[:, at:at + 2].copy().view("<u2")
        raw[:, at:at + 2] = ((pair & 0x83FF) | ((15 - e - less) << 10)).astype("<u2").view(np.uint8)

    def fixed(at, sign, exponent, mantissa):
        bits = np.array([sign << 15 | (15 + exponent) << 10 | mantissa], dtype="<u2")
        raw[:, at:at + 2] = bits.view(np.uint8)

    if quant == "f16":
        signed(0, 0)
    elif quant == "bf16":
        pair = raw.copy().view("<u2")
        raw = ((pair & 0x807F) | ((127 - e) << 7)).astype("<u2").view(np.uint8)
    elif quant in ("q4_0", "q5_0", "q8_0", "iq4_nl"):
        signed(0, {"q4_0": 2, "q5_0": 3, "q8_0": 6, "iq4_nl": 6}[quant])
    elif quant == "mxfp4":
        raw[:, 0] = 126 - e
    elif quant in ("q4_1", "q5_1"):
        less = 2 if quant == "q4_1" else 3
        fixed(0, 0, -e - less, 0)
        # -7.5 and -15.5 times the scale.
        fixed(2, 1, -e, 0x380 if quant == "q4_1" else 0x3C0)
    elif quant in ("q4_k", "q5_k"):
        less = 8 if quant == "q4_k" else 9
        fixed(0, 0, -e - less, 0)
        fixed(2, 0, -e - 6, 0x380 if quant == "q4_k" else 0x3C0)
        raw[:, 4:8] |= 0xA0
        raw[:, 8:12] = raw[:, 4:8]
        low = raw[:, 12:16] & 15
        raw[:, 12:16] = low | low << 4
    elif quant == "q6_k":
        byte = raw[:, 192:208]
        size = (byte & 0x1F) | 0x20
        raw[:, 192:208] = np.where(byte & 0x80 == 0, size, 256 - size.astype(np.int32)).astype(np.uint8)
        signed(208, 9)
    return raw.tobytes()


def tensors(model):
    """Name, shape (columns first), type and bytes of every tensor, in the order of the file."""
    m = {**USUAL, **model}
    q, kv, hidden, quant = m["heads"] * m["head_size"], m["kv_heads"] * m["head_size"], m["hidden"], m["quant"]
    listed = [("token_embd.weight", [hidden, m["vocab"]], quant)]
    if not m["tied"]:
        listed.append(("output.weight", [hidden, m["vocab"]], "f32" if m["plain_head"] else quant))
    listed.append(("output_norm.weight", [hidden], "f32"))
    for layer in range(m["layers"]):
        for name, cols, rows in (("attn_q", hidden, q), ("attn_k", hidden, kv), ("attn_v", hidden, kv),
                                 ("attn_output", q, hidden), ("ffn_gate", hidden, m["ffn"]),
                                 ("ffn_up", hidden, m["ffn"]), ("ffn_down", m["ffn"], hidden)):
            listed.append((f"blk.{layer}.{name}.weight", [cols, rows], quant))
        for name in ("attn_norm", "ffn_norm"):
            listed.append((f"blk.{layer}.{name}.weight", [hidden], "f32"))
        if m["architecture"] == "qwen2":
            for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
                listed.append((f"blk.{layer}.{name}.bias", [rows], "f32"))
        if m["architecture"] == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                listed.append((f"blk.{layer}.{name}.weight", [m["head_size"]], "f32"))
    if m["freqs"]:
        listed.append(("rope_freqs.weight", [(m["dims"] or m["head_size"]) // 2], "f32"))
    return [(name, dims, quant, data(m, at, name, dims, quant)) for at, (name, dims, quant) in enumerate(listed)]


def data(m, at, name, dims, quant):
    count, seed = int(np.prod(dims)), m["seed"]
    one, half = np.float32(1), np.float32(0.5)
    if m["plain_head"] and name == "output.weight":
        return np.eye(dims[1], dims[0], dtype="<f4").tobytes()
    if m["plain_head"] and name == "output_norm.weight":
        return np.ones(count, dtype="<f4").tobytes()
    if quant != "f32":
        return blocks(quant, dims[0], seed, at, count // BLOCK[KIND[quant]][0])
    part = parts(seed, at, count)
    if name == "rope_freqs.weight":
        part = part * np.float32(7) + one
    elif name.endswith(".bias"):
        part = part - half
    elif len(dims) == 1:
        part = (part - half) * half + one
    else:
        part = (part - half) * np.float32(4.0 / 2 ** steps(dims[0]))
    return part.astype("<f4").tobytes()


def checksum(model):
    """FNV-1a of all weights: both sides must have made the same."""
    sum_ = 0xCBF29CE484222325
    for _, _, _, raw in tensors(model):
        for byte in raw:
            sum_ = (sum_ ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return sum_


def write(model, path):
    """The model as a GGUF file."""
    m = {**USUAL, **model}
    text = lambda s: struct.pack("<Q", len(s)) + s.encode()
    arch = m["architecture"]
    fields = [("general.architecture", 8, text(arch))]
    for key, value in (("block_count", m["layers"]), ("context_length", 256), ("embedding_length", m["hidden"]),
                       ("feed_forward_length", m["ffn"]), ("attention.head_count", m["heads"]),
                       ("attention.head_count_kv", m["kv_heads"]), ("attention.key_length", m["head_size"]),
                       ("attention.value_length", m["head_size"]),
                       ("rope.dimension_count", m["dims"] or m["head_size"])):
        fields.append((f"{arch}.{key}", 4, struct.pack("<I", value)))
    fields.append((f"{arch}.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)))
    fields.append((f"{arch}.rope.freq_base", 6, struct.pack("<f", m["base"])))
    if m["linear"] is not None:
        fields.append((f"{arch}.rope.scaling.type", 8, text("linear")))
        fields.append((f"{arch}.rope.scaling.factor", 6, struct.pack("<f", m["linear"])))
    listed = tensors(model)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(fields))
    head += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in fields)
    body = b""
    for name, dims, quant, raw in listed:
        head += text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", dim) for dim in dims)
        head += struct.pack("<IQ", KIND[quant], len(body))
        body += raw + b"\0" * (-len(raw) % 32)
    with open(path, "wb") as file:
        file.write(head + b"\0" * (-len(head) % 32) + body)
