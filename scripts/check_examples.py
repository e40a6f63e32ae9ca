#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every example of `spanker --help` and of the help of every command below it, and every row of README.md's table of
commands, as printed, each within a minute.

    scripts/check_examples.py target/debug/spanker [part of a command ..]

They run in a folder of their own, with a small synthetic model in place of smollm2-135m. Left out, and said so: what needs a
GPU, a launcher of processes, a manual page viewer or the network. What an example writes, the next may read.
"""
import os
import re
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIMIT = 60
# What this machine may not have.
NEEDS = [
    (re.compile(r"--fabric cuda|gpu:\d|gpu\.toml"), "a GPU"),
    (re.compile(r"\bmpirun\b"), "mpirun"),
    (re.compile(r"\bman -l\b"), "a viewer of manual pages"),
    (re.compile(r"^spanker fetch\b"), "the network"),
    (re.compile(r"--like (llama-3-8b|tinyllama-1.1b|qwen2.5-0.5b)"), "gigabytes of disk"),
]
# Examples that show what does not fit, which is exit code 3.
TOO_LARGE = {"spanker plan llama-2-70b --cards 8"}
# What a person says to `chat`.
STDIN = "What is a sail?\n"
# What measures for seconds, and can be told to take less.
BRIEF = re.compile(r"spanker bench all-(reduce|gather)(?! --fabric)[^&]*")
# A model that takes no time.
SMALL = "--hidden 64 --heads 4 --kv-heads 2 --ffn 128 --layers 4 --vocab 512 --quant q8_0".split()


def commands_below(text):
    """The names in a help text's list of commands."""
    found, listed = [], False
    for line in text.splitlines():
        if line.strip() == "Commands:":
            listed = True
        elif listed and re.match(r"^  [a-z]", line):
            found.append(line.split()[0])
        elif listed and line and not line.startswith(" "):
            break
    return [name for name in found if name != "help"]


def help_texts(spanker, words=()):
    done = subprocess.run([spanker, *words, "--help"], capture_output=True, text=True, check=True)
    yield done.stdout
    for name in commands_below(done.stdout):
        yield from help_texts(spanker, (*words, name))


def examples_in(text):
    """Indented commands; two spaces and more part a command from what it is for."""
    for line in text.splitlines():
        if re.match(r"^  (spanker|mpirun|echo) ", line):
            yield re.split(r"\s{2,}", line.strip())[0]


def tables_in(text):
    """Tables that a help text shows: a line that names a file, then lines with commas."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        named = re.match(r"^Example, (\S+\.csv):$", line)
        if named:
            rows = []
            for row in lines[at + 1 :]:
                if "," not in row:
                    break
                rows.append(row.strip())
            yield named.group(1), "\n".join(rows) + "\n"


def readme_rows():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        used = file.read().split("## Use it")[1].split("\n## ")[0]
    rows = [line for line in used.splitlines() if line.startswith("| ")]
    return [code for row in rows for code in re.findall(r"`(spanker [^`]*)`", row)]


def prepare(spanker, env, folder, texts):
    """The files that examples name."""
    manual = [".local/share/bash-completion/completions", ".config/fish/completions", ".zfunc", ".local/share/man/man1"]
    for name in manual:
        os.makedirs(os.path.join(folder, name))
    files = {"prompt.txt": "Once upon a time", "cluster.toml": 'topology = "ring"\n[[cards]]\nprofile = "rev-a"\ncount = 4\n'}
    files.update(table for text in texts for table in tables_in(text))
    for name, text in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    made = [["synth", "llama", *SMALL, "--out", "model.gguf"]]
    # The prompt has as many tokens as bytes.
    made += [["plan", "model.gguf", "--fabric", "inproc", "--cards", "2", "--prompt", "5", "--out", "own.json"]]
    made += [["plan", "model.gguf", "--cards", "4", "--out", "plan.json"]]
    made += [["fit", "link", "--samples", "all_reduce.csv", "--out", "link.toml"]]
    made += [["fit", "card", "--samples", "decode.csv", "--out", "card.toml"]]
    made += [["simulate", "own.json", "--prompt", "--tokens", "16", "--trace", "predicted.json"]]
    run = ["run", "-m", "model.gguf", "-p", "Hello", "-n", "24", "--ignore-eos"]
    made += [[*run, "--plan", "own.json", "--trace", "measured.json"], [*run, "--compare", "--trace", "both.json"]]
    for words in made:
        subprocess.run([spanker, *words], cwd=folder, env=env, check=True, capture_output=True)


def tried(command, folder, env):
    """The exit code of a command, and what it said."""
    try:
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, input=STDIN, text=True, timeout=LIMIT, capture_output=True)
        return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
    except subprocess.TimeoutExpired:
        return "none", f"it takes more than {LIMIT} s"


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    spanker, chosen = os.path.abspath(sys.argv[1]), sys.argv[2:]
    texts = list(help_texts(spanker))
    examples = [one for text in texts for one in examples_in(text)] + readme_rows()
    # What begins with cards of its own is run wherever it stands: the next examples are for these.
    seen = set()
    once = lambda one: "twin up" in one or not (one in seen or seen.add(one))
    examples = [one for one in examples if once(one) and (not chosen or any(part in one for part in chosen))]
    failed, left_out, begun = [], {}, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(spanker, os.path.join(folder, "spanker"))
        env = dict(os.environ, PATH=folder + os.pathsep + os.environ["PATH"], HOME=folder)
        env.update(SPANKER_CACHE=folder + "/cache", SPANKER_DEV_DIR=folder + "/dev")
        prepare(spanker, env, folder, texts)
        for one in examples:
            need = next((what for pattern, what in NEEDS if pattern.search(one)), None)
            if need:
                left_out.setdefault(need, []).append(one)
                continue
            if "twin up" in one:
                tried("spanker twin down", folder, env)
            at = time.monotonic()
            small = one.replace("smollm2-135m", "model.gguf")
            code, said = tried(BRIEF.sub(r"\g<0> --budget 10", small), folder, env)
            works = code == (3 if one in TOO_LARGE else 0)
            print(f"{'ok' if works else 'FAIL':4} {time.monotonic() - at:5.1f} s  {one}", flush=True)
            if not works:
                failed.append(one)
                print(f"exit code {code} of {one}\n{said}", file=sys.stderr)
        tried("spanker twin down", folder, env)
    for need, commands in left_out.items():
        print(f"left out, as they need {need}: {len(commands)}")
    ran = len(examples) - sum(map(len, left_out.values()))
    print(f"{ran - len(failed)} of {ran} examples work as printed, in {time.monotonic() - begun:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
