# SPDX-License-Identifier: Apache-2.0
# The maintainers' commands (https://just.systems). Each is one call of a script or of cargo, which can be typed as well.
# CONTRIBUTING.md has the same list; a test compares them.

set positional-arguments

[private]
default:
    @just --list --unsorted

# Plan, verify and run a small model on three emulated cards
demo:
    scripts/demo

# Plans, simulations, collectives and losses: what is under the demo
tour:
    scripts/tour

# Everything that must hold before a change lands; CI runs it
check:
    scripts/check

# Tests of the default crates; arguments go to cargo
test *args:
    cargo test "$@"

# Licences, sources and duplicate versions of all dependencies
licences:
    cargo test --package tidy --test dependencies

# Download a small model, SmolLM2 unless another is named
fetch model="smollm2-135m":
    cargo run --release --package spanker-cli -- fetch "$1"

# Ranks that are processes, on Open MPI and MPICH
check-mpi:
    scripts/check-mpi

# A model over two hosts that are network namespaces; needs root
two-hosts *args:
    scripts/two-hosts "$@"

# A leader and two workers over a network of namespaces, with a binary; needs root
two-machines *args:
    scripts/two-machines "$@"

# Every example of --help and of the README, with a binary
check-examples *args:
    scripts/check-examples "$@"

# Pages in a real browser: the chat of `spanker serve`, its cards, and reports; with a binary
check-page *args:
    scripts/check-page "$@"

# What `spanker serve` promises, from outside: tokens at any load, lost cards, bad clients, overload; with a binary
check-serve *args:
    scripts/check-serve "$@"

# OpenAI's and other clients, fuzzed requests and a thousand schemas against `spanker serve`, with a binary
check-clients *args:
    scripts/check-clients "$@"

# Everything that needs a GPU, with the binary in $SPANKER
check-gpu *args:
    scripts/check-gpu "$@"

# Kill emulated cards for five minutes and see that nothing is left
check-twin *args:
    scripts/check-twin "$@"

# A million work-stealing runs with faults in virtual time
check-steal *args:
    scripts/check-steal "$@"

# A hundred million frames over a link with errors
check-link *args:
    scripts/check-link "$@"

# How fast two release builds are, in turns
compare-versions *args:
    scripts/compare-versions "$@"

# Predictions for threads of this machine against measurements
check-predictions *args:
    scripts/check-predictions "$@"

# Logits and greedy tokens of SmolLM2 against llama.cpp
agree-with-llama-cpp:
    scripts/agree-with-llama-cpp

# Speed, loading and memory against llama.cpp
compare-llama-cpp *args:
    scripts/compare-llama-cpp "$@"

# What clients of a server see, against llama.cpp's server
compare-serve *args:
    scripts/compare-serve "$@"

# The message fabric and emulated cards against Open MPI
compare-open-mpi:
    scripts/compare-open-mpi

# Reductions on a GPU against PyTorch
compare-pytorch *args:
    scripts/compare-pytorch "$@"

# Coverage-guided fuzzing: [frames|models|requests|work|all] [SECONDS]
fuzz *args:
    scripts/fuzz "$@"

# Known bugs in a copy of the work-stealing scheduler: its tests must find each
mutants *args:
    scripts/mutants "$@"
