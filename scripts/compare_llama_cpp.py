#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The turns and tables of scripts/compare-llama-cpp."""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def lines(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class Sides:
    """Both programs with the same work to do."""

    def __init__(self, args):
        self.args = args
        self.work = ["-p", str(args.prompt), "-n", str(args.generated), "-r", str(args.repeats)]

    def ours(self, model, *flags):
        return lines([self.args.spanker, "bench", "model", "-m", model, "--json", *self.work, *flags])

    def theirs(self, model, *flags):
        return lines([self.args.python, os.path.join(HERE, "llama_cpp_speed.py"), model, *self.work, *flags])


def mark(ratio, bar):
    return f"{ratio:5.2f}{' ' if ratio >= bar else '!'}"


def speeds(sides, model, threads):
    """Medians over all repeats of all rounds: {threads: (theirs, ours)} for prompts and for tokens."""
    all_ = {count: {"prefill": ([], []), "decode": ([], [])} for count in threads}
    flags = ["-t", ",".join(map(str, threads))]
    for _ in range(sides.args.rounds):
        for row in sides.theirs(model, *flags):
            for what in ("prefill", "decode"):
                all_[row["threads"]][what][0].extend(row[what])
        for row in sides.ours(model, *flags):
            all_[row["threads"]]["prefill"][1].extend(row["prompt"]["each"])
            all_[row["threads"]]["decode"][1].extend(row["generation"]["each"])
    return {count: {what: tuple(map(statistics.median, pair)) for what, pair in both.items()}
            for count, both in all_.items()}


def table(sides, models):
    one = next(iter(models.values()))
    build = lines([sides.args.python, os.path.join(HERE, "llama_cpp_speed.py"), one, "-p", "8", "-n", "1", "-r", "1"])
    print(f"# theirs: llama-cpp-python {build[0]['build']}")
    print("# prompt (pp) and tokens (tg) per second; bars: tg ratio >= 0.9, pp ratio >= 0.6; ! misses its bar")
    print(f"{'model':<24} {'threads':>7} | {'pp theirs':>9} {'ours':>9} {'ratio':>6} | "
          f"{'tg theirs':>9} {'ours':>9} {'ratio':>6}", flush=True)
    for name, model in models.items():
        for count, both in speeds(sides, model, [1, 2]).items():
            (p1, p2), (d1, d2) = both["prefill"], both["decode"]
            print(f"{name:<24} {count:>7} | {p1:>9.1f} {p2:>9.1f} {mark(p2 / p1, 0.6)} | "
                  f"{d1:>9.2f} {d2:>9.2f} {mark(d2 / d1, 0.9)}", flush=True)


def loading(sides, model):
    row = sides.ours(model, "-t", "2")[0]
    memory = row["memory"]
    may = (memory["file_bytes"] + memory["kv_bytes"]) * 1.1
    print(f"\n# loading and memory of ours, {memory['file_bytes'] / 1e6:.1f} MB")
    print(f"load {row['load_ms']:.0f} ms (bar: < 1000); most memory {memory['peak_bytes'] / 1e6:.1f} MB of "
          f"{may / 1e6:.1f} MB (bar: file + keys and values + 10 %: "
          f"{'kept' if memory['peak_bytes'] <= may else 'missed'})", flush=True)


def two_cards(sides, models):
    print("\n# two in-process cards against one card with two threads (bar: 0.9)")
    for name, model in models.items():
        one, two = [], []
        for _ in range(sides.args.rounds):
            for row in sides.ours(model, "-t", "2", "--cards", "1,2"):
                (one if row["cards"] == 1 else two).extend(row["generation"]["each"])
        one, two = statistics.median(one), statistics.median(two)
        print(f"{name:<24} one card {one:8.2f} tok/s, two cards {two:8.2f}, ratio {mark(two / one, 0.9)}", flush=True)


def under_load(sides, models):
    print("\n# two threads while a busy process has core 0 (bar: ours keeps 0.4)")
    for name, model in models.items():
        figures = {}
        for _ in range(sides.args.rounds):
            for busy in (False, True):
                load = None
                if busy:
                    load = subprocess.Popen(["taskset", "-c", "0", sys.executable, "-c", "while True: pass"])
                try:
                    theirs = sides.theirs(model, "-t", "2")[0]["decode"]
                    ours = sides.ours(model, "-t", "2")[0]["generation"]["each"]
                finally:
                    if load:
                        load.kill()
                        load.wait()
                figures.setdefault(("theirs", busy), []).extend(theirs)
                figures.setdefault(("ours", busy), []).extend(ours)
        middle = {key: statistics.median(values) for key, values in figures.items()}
        for who, bar in (("theirs", 0.0), ("ours", 0.4)):
            quiet, busy = middle[who, False], middle[who, True]
            print(f"{name:<24} {who:<6} quiet {quiet:8.2f} tok/s, busy {busy:8.2f}, kept {mark(busy / quiet, bar)}", flush=True)


def twin(sides, name, model):
    spanker = sides.args.spanker
    subprocess.run([spanker, "twin", "up", "--cards", "4", "--profile", "rev-a", "--topology", "ring"],
                   check=True, stdout=subprocess.DEVNULL)
    card, threads = [], []
    try:
        for _ in range(sides.args.rounds):
            card.extend(sides.ours(model, "--fabric", "cards"))
            threads.extend(sides.ours(model, "--cards", "4", "-t", "4"))
    finally:
        subprocess.run([spanker, "twin", "down"], stdout=subprocess.DEVNULL)
    row = card[0]
    measured, predicted = row["generation"]["card_tokens_per_second"], row["generation"]["predicted_tokens_per_second"]
    off = (measured / predicted - 1) * 100
    print(f"\n# {name} on 4 emulated cards, rev-a in a ring, {row['strategy']}")
    print(f"card time {measured:.3f} tok/s, predicted {predicted:.3f}: {off:+.1f} % (bar: within 10 %)")
    pairs = (("pp", "prompt", 0.0), ("tg", "generation", 0.5))
    for what, key, bar in pairs:
        emulated = statistics.median(speed for row in card for speed in row[key]["each"])
        plain = statistics.median(speed for row in threads for speed in row[key]["each"])
        print(f"{what} wall speed {emulated:.2f} tok/s, 4 in-process cards {plain:.2f}, ratio "
              f"{mark(emulated / plain, bar)} (bar for tg: 0.5)", flush=True)


def main():
    # Whoever ends this also ends the busy process and the twin.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    flags = argparse.ArgumentParser()
    flags.add_argument("spanker")
    flags.add_argument("python")
    flags.add_argument("models")
    flags.add_argument("--quick", action="store_true")
    flags.add_argument("--only", default="speed,load,cards,busy,twin")
    args = flags.parse_args()
    args.prompt, args.generated = (64, 16) if args.quick else (128, 64)
    args.rounds, args.repeats = (3, 1) if args.quick else (5, 3)
    sides = Sides(args)
    at = lambda name: os.path.join(args.models, name + ".gguf")
    small = {"smollm2-135m q4_1": at("smollm2-135m")}
    large = {f"tinyllama-1.1b {q}": at(f"synthetic-tinyllama-1.1b-{q}") for q in ("q4_0", "q4_k")}
    print(f"# {args.rounds} rounds in turns, {args.repeats} repeats each, prompt {args.prompt}, "
          f"{args.generated} tokens after it; medians; {os.cpu_count()} cores, load "
          f"{os.getloadavg()[0]:.1f} at the start")
    if os.getloadavg()[0] > 0.5:
        print("# this machine is busy: threads that wait for each other lose far more by that than one thread does, "
              "so ratios of two threads are not ratios of speed")
    only = args.only.split(",")
    some = {**small, "tinyllama-1.1b q4_0": large["tinyllama-1.1b q4_0"]}
    if "speed" in only:
        table(sides, {**small, **large})
    if "load" in only:
        loading(sides, small["smollm2-135m q4_1"])
    if "cards" in only:
        two_cards(sides, some)
    if "busy" in only:
        under_load(sides, some)
    if "twin" in only:
        twin(sides, "tinyllama-1.1b q4_0", large["tinyllama-1.1b q4_0"])


if __name__ == "__main__":
    main()
