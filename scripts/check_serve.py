#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `spanker serve` promises, tried from outside. See scripts/check-serve.

Every part prints what it found, and the exit code is 1 if something does not hold. With --plant, the fault that a part is
for is there, and the exit code is 0 only if the part finds it.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time

import check_serve_load
from serving import Server, part, together

SYNTHETIC = {
    "q8_0": "--layers 4 --hidden 128 --heads 4 --kv-heads 2 --ffn 192 --vocab 300 --quant q8_0",
    "f16": "--layers 3 --hidden 96 --heads 3 --kv-heads 3 --ffn 160 --vocab 300 --quant f16",
    "q4_k": "--layers 3 --hidden 256 --heads 8 --kv-heads 4 --ffn 512 --vocab 300 --quant q4_k",
}
WORDS = "the sea and a ship of wood that went over many hills to find its own small light under old stone bridges".split()
# Requests that differ; with more clients several ask the same.
DISTINCT = 12
# How many at the same time, and requests.
LOADS = ((1, 4), (4, 8), (16, 16), (32, 32))
# Characters of the synthetic models are tokens, so that this many words are two blocks of keys and values at least.
SHARED_WORDS = 40


class Checks:
    """What was checked, and what does not hold."""

    def __init__(self, options):
        self.options, self.failed = options, []

    def check(self, what, holds):
        print(f"{'ok' if holds else 'FAIL':4} {what}", flush=True)
        if not holds:
            self.failed.append(what)


def prompts(count, shared, seed):
    """Requests: half of the prompts begin with the same words. Greedy and not, with and without penalties."""
    chance = random.Random(seed)
    beginning = " ".join(chance.choices(WORDS, k=shared))
    requests = []
    for at in range(count):
        own = f"{at} " + " ".join(chance.choices(WORDS, k=chance.randrange(3, 25)))
        requests.append({
            "prompt": f"{beginning} {own}" if at % 2 else own,
            "max_tokens": chance.randrange(8, 28),
            "temperature": (0, 0.8, 1.3, 0)[at % 4],
            "seed": 1000 + at,
            "repeat_penalty": (1.0, 1.1)[at % 8 == 3],
            "ignore_eos": True,
        })
    return requests


def alone(options, model, kv, requests):
    """The texts of `spanker run`, one request at a time on one card."""
    def run(request):
        command = [options.binary, "run", "-m", model, "-p", request["prompt"], "-n", str(request["max_tokens"]),
                   "--temp", str(request["temperature"]), "--seed", str(request["seed"]), "--kv", kv, "--ignore-eos",
                   "--repeat-penalty", str(request["repeat_penalty"]), "--json", "-t", "1", "--fabric", "inproc"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout)
        return answer["text"], answer["tokens"]

    texts = together(4, run, requests)
    for error in filter(lambda one: isinstance(one, Exception), texts):
        raise error
    return texts


def differing(server, requests, right):
    """Answers under every load, with and without what others have left behind: how many there were, and which differ."""
    answers, wrong = 0, []

    def ask(request):
        status, _, answer = server.post("/v1/completions", request)
        if status != 200:
            return f"status {status}: {answer}", 0, 0
        usage = answer["usage"]
        return answer["choices"][0]["text"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    hits = 0
    for clients, count in LOADS:
        for reuse in (False, True):
            asked = [{**requests[at % len(requests)], "cache_prompt": reuse} for at in range(count)]
            for at, found in enumerate(together(clients, ask, asked)):
                answers += 1
                expected = (right[at % len(requests)][0], asked[at]["max_tokens"])
                if isinstance(found, Exception) or found[:2] != expected:
                    wrong.append((clients, reuse, at, expected, found))
                else:
                    hits += found[2] > 0
                    if not reuse and found[2]:
                        wrong.append((clients, reuse, at, "no token from the cache", found))
    return answers, hits, wrong


class Twin:
    """Emulated cards in a directory of their own, until the end of a `with`."""

    def __init__(self, binary, cards):
        self.binary = binary
        self.folder = tempfile.TemporaryDirectory(prefix="spanker-check-")
        self.environment = {"SPANKER_DEV_DIR": os.path.join(self.folder.name, "cards")}
        self.call("up", "--cards", cards, "--profile", "rev-a", "--topology", "ring")

    def call(self, *arguments):
        environment = {**os.environ, **self.environment}
        subprocess.run([self.binary, "twin", *map(str, arguments)], env=environment, check=True, capture_output=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.call("down")
        self.folder.cleanup()


def places(options):
    """Where a model is served: a name, and what starts a server there for a model with flags."""
    def threads(cards, count):
        def start(model, *flags):
            return Server(options.binary, model, "--cards", cards, "-t", count, *flags)
        return f"threads, {cards} cards, {count} threads", lambda work: work(start)

    def twin(cards):
        def run(work):
            with Twin(options.binary, cards) as cards_up:
                def start(model, *flags):
                    return Server(options.binary, model, "--fabric", "cards", *flags, environment=cards_up.environment)
                return work(start)
        return f"twin, {cards} cards", run

    def gpu(cards):
        def start(model, *flags):
            return Server(options.binary, model, "--fabric", "cuda", "--cards", cards, *flags)
        return f"GPU, {cards} cards", lambda work: work(start)

    def ranks(count):
        def start(model, *flags):
            launcher = [options.mpirun, "-n", str(count)]
            return Server(options.mpi, model, "-t", 1, *flags, launcher=launcher)
        return f"MPI, {count} ranks", lambda work: work(start)

    found = [threads(1, 1), threads(1, 2), threads(2, 1)] + [threads(cards, 2) for cards in (2, 3, 4, 5)]
    found += [twin(cards) for cards in range(1, 6)]
    if options.cuda:
        found += [gpu(cards) for cards in (1, 2)]
    if options.mpi:
        found += [ranks(2), ranks(3)]
    return [place for place in found if not options.only or options.only in place[0]]


def models(options, folder):
    """What is served: name, file, how keys and values are stored, flags, words of the common beginning."""
    found = []
    for quant, shape in SYNTHETIC.items():
        path = os.path.join(folder, f"{quant}.gguf")
        made = [options.binary, "synth", "llama", *shape.split(), "--context", "1024", "--out", path]
        subprocess.run(made, check=True, capture_output=True)
        found += [(f"synthetic {quant}", path, kv) for kv in ("f16", "q8_0")]
    if options.model:
        found += [(options.model, options.model, kv) for kv in ("f16", "q8_0")]
    return found


def tokens(checks):
    """The tokens of `spanker run` alone, at any load, anywhere."""
    options = checks.options
    requests = prompts(DISTINCT, SHARED_WORDS, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        every = models(options, folder)
        right = {(name, kv): alone(options, path, kv, requests) for name, path, kv in every}
        if options.plant:
            right = {key: [(text[:-1] + "~", ids) for text, ids in texts] for key, texts in right.items()}
        total = 0
        for place, run in places(options):
            def work(start, place=place):
                answers, hits, wrong = 0, 0, []
                for name, path, kv in every:
                    with start(path, "--kv", kv, "-c", 768, "--max-queue", 64) as server:
                        more = differing(server, requests, right[name, kv])
                    answers, hits = answers + more[0], hits + more[1]
                    wrong += [(name, kv, *one) for one in more[2]]
                checks.check(f"{place}: {answers} answers, {hits} with tokens from the cache, {len(wrong)} differ", not wrong)
                for one in wrong[:2]:
                    print("    ", one)
                checks.check(f"{place}: the cache was used", hits > 0)
                return answers
            total += run(work)
        print(f"{total} answers in all, against `spanker run`")


# Losses that a server has.
LOSSES = 5
FAULTS = {"kill": "kill", "hang": "stop", "stick": "stick", "garbage": "garble"}


def faults(checks):
    """A card is lost under 16 streams: no request fails, no token changes, nobody waits for long."""
    options = checks.options
    model = options.model or sys.exit("check-serve: faults: --model")
    requests = prompts(16, SHARED_WORDS // 2, options.seed)
    for request in requests:
        request["max_tokens"] = 60
    right = alone(options, model, "f16", requests)
    audit = ["--audit", "0"] if options.plant else []
    for name in options.faults:
        stalls, failed, changed, back, lost = [], [], 0, 0, 0
        # Cards that come and go are looked for less and less often: a server has a few losses.
        for first in range(0, options.seeds, LOSSES):
            with Twin(options.binary, 4) as twin:
                flags = ["--fabric", "cards", "-c", 512, "--parallel", 16, *audit]
                with Server(options.binary, model, *flags, environment=twin.environment) as server:
                    for seed in range(first, min(first + LOSSES, options.seeds)):
                        came = one_loss(server, twin, FAULTS[name], requests, seed)
                        back += came["back"]
                        for at, answer in enumerate(came["answers"]):
                            if isinstance(answer, Exception):
                                failed.append((seed, at, str(answer)))
                                continue
                            text, _, times = answer
                            changed += text != right[at][0]
                            stalls.append(max((after - before for before, after in zip(times, times[1:])), default=0))
                    lost += server.metric("spanker_cards_lost_total")
                    code = server.end()
                    if code != 0:
                        failed.append((first, "the server", f"exit code {code}"))
        slowest = max(stalls, default=0)
        said = f"{name}: {options.seeds} losses under 16 streams, {len(failed)} requests failed, {changed} with other tokens, " \
               f"the longest stall {slowest:.2f} s (median {part(stalls or [0], 0.5):.2f}), {lost:.0f} cards lost"
        checks.check(said, not failed and not changed and slowest <= 2 and lost >= options.seeds)
        for one in failed[:3]:
            print("    ", one)
        checks.check(f"{name}: {back} of {options.seeds} times all cards are taken in again without a restart",
                     back == options.seeds)


def one_loss(server, twin, fault, requests, seed):
    """A card is harmed once some pieces have come, and is put right when everybody has an answer."""
    chance = random.Random(seed)
    card, after = chance.randrange(4), chance.randrange(5, 200)
    pieces, lock = [0], threading.Lock()
    harmed = threading.Event()

    def on_piece(_):
        with lock:
            pieces[0] += 1
            due = pieces[0] == after
        if due:
            twin.call(fault, card)
            harmed.set()

    def ask(request):
        return server.stream("/v1/completions", {**request, "cache_prompt": seed % 2 == 0}, on_piece)

    answers = together(len(requests), ask, requests)
    if not harmed.is_set():
        # Nothing else may have gone wrong before.
        answers.append(RuntimeError("no card was harmed before all answers had ended"))
    # A fault that nobody meets is found by the next step.
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    twin.call("restore")
    serving = lambda: sum(card["state"] == "serving" for card in server.status()["cards"]) == 4
    try:
        server.wait_until("all cards serve again", serving, 30)
        back = True
    except RuntimeError:
        back = False
    return {"answers": answers, "back": back}


def prefix(checks):
    """A prefix of 1,500 tokens: how long the first token takes without it and with it."""
    options = checks.options
    model = options.model or sys.exit("check-serve: prefix: --model")
    cold, warm = [], []
    with Server(options.binary, model, "-c", 2048) as server:
        for turn in range(3):
            chance = random.Random(turn)
            ids = [chance.randrange(1000, 40_000) for _ in range(1500)]
            for times, own in ((cold, 1), (warm, 2), (warm, 3)):
                request = {"prompt": [*ids, own, 7, 8, 9], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
                if options.plant:
                    request["cache_prompt"] = False
                _, _, came = server.stream("/v1/completions", request)
                times.append(came[1] - came[0])
    ratio = part(warm, 0.5) / part(cold, 0.5)
    said = f"a prefix of 1,500 tokens: first token {part(cold, 0.5) * 1e3:.0f} ms cold, {part(warm, 0.5) * 1e3:.0f} ms " \
           f"warm, 1/{1 / ratio:.0f}"
    checks.check(said, ratio <= 0.1)


# How far a forecast of tokens in a second may be off, in per cent: by the clocks of emulated cards half of what is
# promised, as one client and sixteen of a split model differ by no more than that, and on this machine.
OFF = {"card time": 5, "this machine": 15}


def forecast(checks):
    """Tokens in a second of 16 clients, as foretold: by the clocks of emulated cards, and on this machine."""
    options = checks.options
    model = options.model or sys.exit("check-serve: forecast: --model")

    def row(clients, *flags, environment=None):
        command = [options.binary, "bench", "serve", "-m", model, "-c", "512", "--clients", clients, "-r", "1", "-n", "16", "--json",
                   "--quiet", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **(environment or {})})
        return json.loads(done.stdout.splitlines()[-1])

    def compare(name, clock, flags, environment=None):
        seen = row("16", *flags, environment=environment)
        # What is planted is what was foretold of other clients.
        foretold = row("1", *flags, environment=environment) if options.plant else seen
        measured = seen["card_tokens_per_second" if clock == "card time" else "tokens_per_second"]
        predicted = foretold["predicted"]["tokens_per_second"]
        off = 100 * (predicted / measured - 1)
        steps = f"{seen['steps']} steps, {seen['predicted']['steps']} foretold"
        checks.check(f"{name}, {clock}: {measured:.2f} tokens/s, {predicted:.2f} foretold, {off:+.1f} %; {steps}", abs(off) <= OFF[clock])

    for cards, splits in ((1, ("gather",)), (3, ("gather",)), (4, ("gather", "pipeline", "mixed", None))):
        with Twin(options.binary, cards) as twin:
            for split in splits:
                flags = ["--fabric", "cards", *(["--split", split] if split else [])]
                name = f"twin, {cards} cards, {split or 'as planned'}"
                compare(name, "card time", flags, twin.environment)
    compare("threads", "this machine", ["--fabric", "inproc"])


PARTS = {"tokens": tokens, "forecast": forecast, "faults": faults, "prefix": prefix, **check_serve_load.PARTS}


def main():
    about = "; ".join(f"{name}: {work.__doc__.splitlines()[0]}" for name, work in PARTS.items())
    parser = argparse.ArgumentParser(prog="check-serve", description=about)
    parser.add_argument("binary")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} [default: all]")
    parser.add_argument("--model", default="smollm2-135m", help="a model that was fetched; nothing for none")
    parser.add_argument("--mpi", help="a binary for MPI, as scripts/with-mpi builds it")
    parser.add_argument("--cuda", action="store_true", help="also on this machine's GPUs")
    parser.add_argument("--mpirun", default="mpirun.openmpi")
    parser.add_argument("--only", help="only places whose names have this in them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=50, help="losses of each kind")
    parser.add_argument("--faults", default="kill,hang,garbage", type=lambda text: text.split(","))
    parser.add_argument("--seconds", type=int, default=60, help="how long overload takes")
    parser.add_argument("--connections", type=int, default=10_000, help="connections that are given up")
    parser.add_argument("--plant", action="store_true", help="plant the fault that a part is for: it must be found")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]}")
    options.binary = os.path.abspath(options.binary)
    checks = Checks(options)
    for name in options.parts or PARTS:
        begun, before = time.monotonic(), len(checks.failed)
        print(f"== {name}", flush=True)
        PARTS[name](checks)
        print(f"   {time.monotonic() - begun:.0f} s", flush=True)
        if options.plant and len(checks.failed) == before:
            sys.exit(f"check-serve: {name} did not find what was planted")
    if options.plant:
        print("what was planted was found")
    elif checks.failed:
        sys.exit(f"check-serve: {len(checks.failed)} do not hold: " + "; ".join(checks.failed))


if __name__ == "__main__":
    main()
