#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables of scripts/agree-with-llama-cpp: every prompt is printed, whether or not it agrees."""
import os
import sys
import tempfile

import numpy as np
from llama_cpp import Llama
from llama_cpp_prompts import PROMPTS, TOKENS, spanker_json

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../crates/spanker-llm/tests/oracle"))
from oracle import Oracle  # noqa: E402

# Prompts after which all tokens agree, at least.
NEEDED = 5


def ours(spanker, model, prompt, folder):
    path = os.path.join(folder, "logits")
    command = [spanker, "run", "-m", model, "-p", prompt, "-n", str(TOKENS), "--temp", "0", "--ignore-eos", "--json",
               "--logits", path]
    report = spanker_json(command)
    return np.fromfile(path, dtype="<f4"), report["tokens"], report["prompt"]["tokens"]


def theirs(llama, tokens):
    llama.reset()
    llama.eval(tokens)
    logits = np.array(llama.scores[llama.n_tokens - 1])
    made = []
    while len(made) < TOKENS:
        made.append(int(np.argmax(llama.scores[llama.n_tokens - 1])))
        llama.eval([made[-1]])
    return logits, made


def main():
    spanker, model = sys.argv[1:]
    llama = Llama(model, n_ctx=256, n_threads=os.cpu_count(), verbose=False, logits_all=True)
    oracle = Oracle(model)
    print(f"# differences over the standard deviation of llama.cpp's logits; first of {TOKENS} greedy tokens that "
          "differs, and what lay between the two best logits of llama.cpp there")
    print(f"{'prompt':<42} {'max':>6} {'rms':>6} {'ours-numpy':>10} {'theirs-numpy':>12} {'same best':>9}  tokens")
    whole, all_rms = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for prompt in PROMPTS:
            tokens = llama.tokenize(prompt.encode(), add_bos=False)
            mine, made, count = ours(spanker, model, prompt, folder)
            if count != len(tokens):
                raise SystemExit(f"{prompt!r}: {count} tokens here and {len(tokens)} there")
            other, wanted = theirs(llama, tokens)
            third = oracle.logits(tokens)
            scale = other.std()
            rms = lambda a, b: float(np.sqrt(((a - b) ** 2).mean()) / scale)
            all_rms.append((rms(mine, other), rms(mine, third), rms(other, third)))
            at = next((at for at in range(TOKENS) if made[at:at + 1] != wanted[at:at + 1]), None)
            if at is None:
                said = f"all {TOKENS} agree"
                whole += 1
            else:
                best = np.sort(llama.scores[len(tokens) + at - 1])[-2:]
                said = f"differ at {at + 1} (gap {(best[1] - best[0]) / scale:.3f})"
            same = "yes" if mine.argmax() == other.argmax() else "no"
            print(f"{prompt!r:<42} {np.abs(mine - other).max() / scale:>6.3f} {all_rms[-1][0]:>6.3f} "
                  f"{all_rms[-1][1]:>10.3f} {all_rms[-1][2]:>12.3f} {same:>9}  {said}", flush=True)
    middle = np.median(np.array(all_rms), axis=0)
    print(f"median rms: ours-theirs {middle[0]:.3f}, ours-numpy {middle[1]:.3f}, theirs-numpy {middle[2]:.3f}")
    print(f"{whole} of {len(PROMPTS)} prompts agree in all {TOKENS} tokens (needed: {NEEDED})")
    sys.exit(0 if whole >= NEEDED else 1)


main()
