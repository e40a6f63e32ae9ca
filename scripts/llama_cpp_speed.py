#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How fast llama.cpp takes a prompt and makes tokens: one JSON object for each number of threads.

Tokens are generated after the prompt, the best one every time. Repeats take turns between numbers of threads,
after one each to warm up; every one is printed.
"""
import argparse
import ctypes
import json
import time

import llama_cpp as ll
import numpy as np


BATCH = 512


def decode(context, tokens):
    """Computes tokens, so many at a time as one call takes."""
    for start in range(0, len(tokens), BATCH):
        decode_batch(context, tokens[start : start + BATCH])


def decode_batch(context, tokens):
    array = (ll.llama_token * len(tokens))(*tokens)
    code = ll.llama_decode(context, ll.llama_batch_get_one(array, len(tokens)))
    if code != 0:
        raise SystemExit(f"llama_decode of {len(tokens)} tokens returned {code}")
    ll.llama_synchronize(context)


def best(context, vocab):
    logits = ctypes.cast(ll.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float))
    return int(np.argmax(np.ctypeslib.as_array(logits, shape=(vocab,))))


def once(context, vocab, threads, prompt, count):
    ll.llama_set_n_threads(context, threads, threads)
    ll.llama_memory_clear(ll.llama_get_memory(context), True)
    begun = time.perf_counter()
    decode(context, prompt)
    prefill = len(prompt) / (time.perf_counter() - begun)
    begun = time.perf_counter()
    for _ in range(count):
        decode(context, [best(context, vocab)])
    return prefill, count / (time.perf_counter() - begun)


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("model")
    flags.add_argument("-t", "--threads", default="1,2")
    flags.add_argument("-p", "--prompt", type=int, default=128)
    flags.add_argument("-n", "--generated", type=int, default=64)
    flags.add_argument("-r", "--repeats", type=int, default=3)
    args = flags.parse_args()
    threads = [int(part) for part in args.threads.split(",")]

    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(quiet, ctypes.c_void_p(0))
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(args.model.encode(), ll.llama_model_default_params())
    if not model:
        raise SystemExit(f"{args.model}: llama.cpp cannot load it")
    settings = ll.llama_context_default_params()
    settings.n_ctx = args.prompt + args.generated
    settings.n_batch = settings.n_ubatch = BATCH
    settings.n_threads = settings.n_threads_batch = max(threads)
    context = ll.llama_init_from_model(model, settings)
    vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    prompt = [(100 + 7 * at) % vocab for at in range(args.prompt)]

    build = f"{ll.__version__}; {ll.llama_print_system_info().decode().strip(' |')}"
    rows = {count: ([], []) for count in threads}
    for turn in range(args.repeats + 1):
        for count, (prefills, decodes) in rows.items():
            prefill, speed = once(context, vocab, count, prompt, args.generated)
            if turn > 0:
                prefills.append(prefill)
                decodes.append(speed)
    for count, (prefills, decodes) in rows.items():
        print(json.dumps({"threads": count, "prefill": prefills, "decode": decodes, "build": build}))


main()
