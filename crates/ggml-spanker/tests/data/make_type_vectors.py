#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes `types.txt`: blocks of every type, what the Python package `gguf` decodes them to, and what it makes of numbers.

    pip install gguf==0.19.0 numpy==2.4.6
    python make_type_vectors.py
"""
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants

# Where each type has its scales.
SCALES = {
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0], "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208],
    "iq4_nl": [0], "mxfp4": [], "q2_k": [80, 82], "q3_k": [108], "iq4_xs": [0], "iq2_xxs": [0], "iq2_xs": [0],
    "iq3_xxs": [0], "tq1_0": [52], "tq2_0": [64], "bf16": None,
}


def main():
    rng = np.random.default_rng(20261119)
    values = np.concatenate([rng.normal(size=160), np.zeros(32), rng.normal(size=64) * 1e-3]).astype("<f4")
    lines = ['# type, blocks, what they decode to, what the values become ("-" where the package does not say)',
             "values " + values.tobytes().hex()]
    for name, scales in SCALES.items():
        kind = Type[name.upper()]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks, decoded, encoded = "-", "-", "-"
        if scales is not None:
            raw = rng.integers(0, 256, size=(256 // block, size), dtype=np.uint8)
            for at in scales:
                raw[:, at:at + 2] = rng.uniform(-0.1, 0.1, (len(raw), 1)).astype("<f2").view(np.uint8)
            blocks = raw.tobytes().hex()
            decoded = quants.dequantize(raw.reshape(-1), kind).astype("<f4").tobytes().hex()
        try:
            encoded = quants.quantize(values.reshape(1, -1), kind).tobytes().hex()
        except NotImplementedError:
            pass
        lines.append(" ".join([name, blocks, decoded, encoded]))
    (Path(__file__).parent / "types.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
