# SPDX-License-Identifier: Apache-2.0
"""What the comparisons with llama.cpp have in common: the prompts, how many tokens follow each, and how spanker is asked."""

import json
import subprocess

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a land far away",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are",
    "The quick brown fox jumps over",
    "To make a cup of tea, first",
    "The largest planet in our solar system is",
    "1, 2, 3, 4, 5,",
    "In 1969, the first humans",
    "Photosynthesis is the process by which",
    "The opposite of hot is",
]
TOKENS = 16


def spanker_json(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{command}: {done.stderr}")
    return json.loads(done.stdout)
