#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of scripts/eval-with-llama-cpp: bits per byte and right answers of `spanker eval` and of llama.cpp on the same
items, with keys and values as f16, q8_0 and q4_0 here; and the first greedy tokens after a dozen prompts."""

import json
import math
import sys
import tempfile

import numpy as np
from llama_cpp_library import Model
from llama_cpp_prompts import PROMPTS, TOKENS, spanker_json

CONTEXT = 512


def ours(spanker, model, items, limit, kv):
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/scores"
        command = [spanker, "eval", items, "-m", model, "--limit", str(limit), "--kv", kv, "--json"]
        report = spanker_json([*command, "--ctx-size", str(CONTEXT), "--out", out])
    return report["bits_per_byte"], report["correct"], report["tokens"]


def theirs(model, items, limit):
    bits, size, right, tokens = 0.0, 0, 0, 0
    with open(items) as lines:
        for line, _ in zip(lines, range(limit)):
            item = json.loads(line)
            item = item.get("request", item)
            context, rest = item["context"], item["continuation"]
            before, whole = model.tokens(context), model.tokens(context + rest)
            same = next((at for at, (a, b) in enumerate(zip(before, whole)) if a != b), len(before))
            first = max(min(same, len(whole) - 1), 1)
            logits = model.logits(whole[:-1], first - 1, CONTEXT).astype(np.float64)
            scored = whole[first:]
            largest = logits.max(axis=1)
            sums = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
            bits += sum((sums - logits[np.arange(len(scored)), scored]) / math.log(2))
            right += all(logits.argmax(axis=1) == scored)
            size, tokens = size + len(rest.encode()), tokens + len(scored)
    return bits / size, right, tokens


def greedy(spanker, path, model):
    same = 0
    print(f"\n| prompt | first different of {TOKENS} tokens | llama.cpp's two best logits there | ours |")
    print("|---|---|---|---|")
    for prompt in PROMPTS:
        command = [spanker, "run", "-m", path, "-p", prompt, "-n", str(TOKENS), "--temp", "0"]
        found = spanker_json([*command, "--ignore-eos", "--json"])["tokens"]
        tokens = model.tokens(prompt)
        for at in range(TOKENS):
            logits = model.logits(tokens)[-1]
            best = np.argsort(-logits)[:2]
            if int(best[0]) != found[at]:
                apart = f"{best[0]}: {logits[best[0]]:.3f}, {best[1]}: {logits[best[1]]:.3f}"
                own = f"{found[at]}: {logits[found[at]]:.3f}"
                print(f"| {prompt!r} | {at} | {apart} | {own} |")
                break
            tokens.append(int(best[0]))
        else:
            same += 1
            print(f"| {prompt!r} | | | |")
    print(f"\nthe same {TOKENS} tokens after {same} of {len(PROMPTS)} prompts")


def main():
    spanker, path, items, limit = sys.argv[1:5]
    limit, model = int(limit), Model(path)
    bits, right, tokens = theirs(model, items, limit)
    print(f"{limit} items, {tokens} tokens\n\n| | keys and values | bits per byte | right | from llama.cpp |")
    print("|---|---|---|---|---|")
    print(f"| llama.cpp | f16 | {bits:.4f} | {right} | |", flush=True)
    for kv in sys.argv[5:] or ["f16", "q8_0", "q4_0"]:
        own, right, counted = ours(spanker, path, items, limit, kv)
        if counted != tokens:
            raise SystemExit(f"{counted} tokens are scored here, {tokens} by llama.cpp")
        apart = (own / bits - 1) * 100
        print(f"| `spanker eval` | {kv} | {own:.4f} | {right} | {apart:+.2f} % |", flush=True)
    greedy(spanker, path, model)


main()
