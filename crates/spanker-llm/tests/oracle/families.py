#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes ../vectors/families.json anew: what llama.cpp says of the synthetic files that its lines describe.

    python families.py SPANKER

with a Python of scripts/setup-xllamacpp and a `spanker` to make the files with. Lines with `trained` are kept, because their
files have factors of positions besides, which only the tests make; and so are those with `by`, which somebody else computed.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
from llama_cpp_library import Model  # noqa: E402

VECTORS = Path(__file__).parent.parent / "vectors" / "families.json"
FLAGS = ["layers", "heads", "kv_heads", "ffn", "window", "experts", "experts_used", "quant"]
USUAL = {"ffn": 160, "quant": "q8_0"}


def said(path, cases):
    """The most likely token and the first 32 logits after tokens."""
    model = Model(path)
    for case in cases:
        logits = model.logits(case["tokens"])[-1]
        numbers = [round(float(number), 5) for number in logits[:32]]
        case |= {"next": int(np.argmax(logits)), "logits": numbers}
    return cases


def main():
    lines = json.loads(VECTORS.read_text())
    for line in lines:
        if "trained" in line or "by" in line:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/m.gguf"
            command = [sys.argv[1], "synth", line["architecture"], "--out", path]
            command += "--hidden 96 --head-size 32 --vocab 300 --context 256 --seed 0".split()
            for key, value in (USUAL | line).items():
                if key in FLAGS:
                    command += [f"--{key.replace('_', '-')}", str(value)]
            subprocess.run(command, check=True, capture_output=True)
            line["cases"] = said(path, line["cases"])
    VECTORS.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")


if __name__ == "__main__":
    main()
