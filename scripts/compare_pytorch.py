#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The turns and tables of scripts/compare-pytorch."""
import argparse
import glob
import json
import os
import statistics
import subprocess
import sys

# Repeats in a turn of PyTorch, and turns of which the median counts; as in 'spanker bench'.
REPEATS, TURNS = 8, 15


def libraries():
    """The folders of NVIDIA's libraries that were installed beside PyTorch, without loading it."""
    found = []
    for place in sys.path:
        for pattern in ("nvidia/*/lib", "torch/lib"):
            found += sorted(folder for folder in glob.glob(os.path.join(place, pattern)) if os.path.isdir(folder))
    return found


def size(text):
    units = {"K": 10, "M": 20, "G": 30}
    return int(text[:-1]) << units[text[-1].upper()] if text[-1].upper() in units else int(text)


def theirs(cards, bytes_):
    """One turn of PyTorch, in this process of its own: median seconds of one all-reduce by the GPU's clock."""
    import torch
    buffers = [torch.rand(bytes_ // 4, device="cuda") for _ in range(cards)]

    def all_reduce():
        total = torch.stack(buffers).sum(0)
        for buffer in buffers:
            buffer.copy_(total)

    for _ in range(3):
        all_reduce()
    seconds = []
    for _ in range(TURNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            all_reduce()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / REPEATS)
    print(json.dumps({"seconds": statistics.median(seconds), "build": torch.__version__}))


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main():
    if sys.argv[1:] == ["--libraries"]:
        print(":".join(libraries()))
        return
    if sys.argv[1:2] == ["--turn"]:
        theirs(int(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(prog="compare-pytorch")
    parser.add_argument("spanker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cards", default="2,4,8")
    parser.add_argument("--sizes", default="64M,256M")
    args = parser.parse_args()
    print(f"# all-reduce of f32 between logical cards that share one GPU; medians of {args.rounds} rounds; "
          "bars: ratio >= 1.3, of copy >= 0.9; ! misses its bar")
    print(f"{'cards':>5} {'size':>6} {'PyTorch (us)':>13} {'ours (us)':>11} {'ratio':>7} {'moved (GB/s)':>13} "
          f"{'of copy':>8}", flush=True)
    build, missed = "", False
    for cards in map(int, args.cards.split(",")):
        for text in args.sizes.split(","):
            both, moved, copies = ([], []), [], []
            for _ in range(args.rounds):
                turn = run([sys.executable, __file__, "--turn", str(cards), str(size(text))])[0]
                build = turn["build"]
                both[0].append(turn["seconds"] * 1e6)
                row = run([args.spanker, "bench", "all-reduce", "--fabric", "cuda", "--cards", str(cards),
                           "--sizes", text, "--json"])[0]
                both[1].append(row["time_us"])
                moved.append(row["moved_gbps"])
                copies.append(row["of_copy"])
            them, us = map(statistics.median, both)
            ratio, copy = them / us, statistics.median(copies)
            marks = ["!" if ratio < 1.3 else " ", "!" if copy < 0.9 else " "]
            missed = missed or "!" in marks
            print(f"{cards:>5} {text:>6} {them:>13.1f} {us:>11.1f} {ratio:>6.2f}{marks[0]} "
                  f"{statistics.median(moved):>13.0f} {copy:>7.3f}{marks[1]}", flush=True)
    print(f"# PyTorch {build}")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
