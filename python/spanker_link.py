#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The inter-card link and the two ways to split a model, as formulas.

The same formulas as `Framing` and `Saturation` of the crate spanker-topology and the module `formula`
of the crate spanker-plan; a test of spanker-plan compares the two. Sizes are bytes, times are seconds,
rates are bytes per second. Nothing here was measured: the defaults are those of the profile rev-a.

    python3 spanker_link.py table
    python3 spanker_link.py all-reduce --ranks 4 --bytes 4096
    python3 spanker_link.py goodput --payload 2048 --ber 1e-6
    python3 spanker_link.py grid
"""

import argparse
import itertools
import json
import math
import os
import sys
from collections import namedtuple

Framing = namedtuple("Framing", "payload overhead ack_bytes ack_every compensation")
Framing.__doc__ = """What a frame adds to its payload. All but `compensation`, the part of all symbols
that clock compensation takes, are bytes; one acknowledgement covers `ack_every` frames."""

Link = namedtuple("Link", "base alpha rate")
Link.__doc__ = """What a message takes, `alpha + bytes / rate`, and `base` before a collective begins."""

Decode = namedtuple("Decode", "read layers hidden memory_rate")
Decode.__doc__ = """A token of a model: bytes of weights that it reads, layers, the width of the residual
stream, and the bytes per second that a card's memory sustains."""

SPANKER = Framing(payload=2048, overhead=24, ack_bytes=16, ack_every=4, compensation=0.0012)
"""Start 4, header 8, payload, CRC 4, end 4, gap 4; 16 bytes of acknowledgement for four frames."""

RAW = 500_000_000
"""Bytes per second of one direction after line coding: four lanes at 1.25 Gb/s, 8b/10b."""

ALPHA = 2e-6
"""What one step of a collective over one hop takes besides the bytes."""

ROUND_TRIP = 1.52e-6
"""64 bytes there and back at the link's MAC."""

PIPELINE = 0.584e-6
"""The part of a round trip, each way, that is not bytes on the wire."""

ACTIVATION = 4.0
"""Bytes of one exchanged activation: f32."""

ALGORITHMS = ("ring", "recursive-doubling", "halving-doubling", "tree", "one-shot", "two-shot")
"""The algorithms that `all_reduce` knows."""


# The link


def efficiency(framing):
    """The part of the raw rate that is payload on a link without errors."""
    acks = framing.ack_bytes / framing.ack_every
    whole = framing.payload + framing.overhead + acks
    return framing.payload / whole * (1.0 - framing.compensation)


def frame_error_rate(framing, ber):
    """The chance that a frame arrives broken at a bit error rate, at ten line bits for a byte."""
    bits = 10.0 * (framing.payload + framing.overhead)
    return -math.expm1(bits * math.log1p(-ber))


def go_back_n(framing, raw, ber, round_trip):
    """The part of the frames that go-back-N delivers: a broken frame costs itself and what was sent
    until its loss was known."""
    broken = frame_error_rate(framing, ber)
    frame = (framing.payload + framing.overhead) / raw
    window = 1.0 + math.ceil(round_trip / frame)
    return (1.0 - broken) / (1.0 - broken + broken * window)


def goodput(framing, raw, ber, round_trip):
    """Payload bytes per second: `raw * efficiency * go_back_n`."""
    return raw * efficiency(framing) * go_back_n(framing, raw, ber, round_trip)


def round_trip(framing, raw, payload, pipeline):
    """A small message there and back at the link's MAC: two frames of that payload and the pipeline
    latency of each direction."""
    frame = (payload + framing.overhead) / raw
    return 2.0 * (frame + pipeline)


def framed_bytes(framing, raw, size):
    """What `size` bytes take on a wire without errors, in as many frames as they need."""
    frames = math.ceil(size / framing.payload)
    each = framing.overhead + framing.ack_bytes / framing.ack_every
    return (size + frames * each) / (raw * (1.0 - framing.compensation))


def saturation(error_rate, failed_trainings, lanes):
    """What a link does at a frame error rate over 10 ms: `keep`, `shrink-frames`, `retrain`,
    `halve-lanes` or `fault`. The policy is this project's own."""
    if error_rate > 0.10 or failed_trainings >= 3:
        return "halve-lanes" if lanes > 1 else "fault"
    if error_rate > 0.05:
        return "retrain"
    return "shrink-frames" if error_rate > 0.01 else "keep"


# Collectives on ranks that reach each other directly, sharing nothing


def all_reduce(algorithm, ranks, size, link):
    """An all-reduce of `size` bytes on each rank."""
    if algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ValueError(f"unknown algorithm '{algorithm}' (expected one of: {known})")
    if ranks < 2:
        return 0.0
    below, above = ranks.bit_length() - 1, (ranks - 1).bit_length()
    scattered = 2.0 * (ranks - 1.0) / ranks
    rounds = float(below if below == above else below + 2)
    steps, buffers = {
        "ring": (2.0 * (ranks - 1.0), scattered),
        "recursive-doubling": (rounds, rounds),
        "halving-doubling": (2.0 * above, scattered),
        "tree": (2.0 * above, 2.0 * above),
        "one-shot": (1.0, ranks - 1.0),
        "two-shot": (2.0, scattered),
    }[algorithm]
    return link.base + link.alpha * steps + buffers * size / link.rate


def star_all_reduce(ranks, size, link):
    """An all-reduce through one root whose link everyone shares."""
    if ranks < 2:
        return 0.0
    return link.base + link.alpha * 2.0 + 2.0 * (ranks - 1.0) * size / link.rate


def ring_all_gather(ranks, size, link):
    """An all-gather around a ring that leaves `size` bytes on each rank."""
    if ranks < 2:
        return 0.0
    return link.base + link.alpha * (ranks - 1.0) + (ranks - 1.0) / ranks * size / link.rate


def framed_ring_all_reduce(ranks, size, framing, raw, alpha):
    """A ring all-reduce in which every chunk pays for its own frames."""
    if ranks < 2:
        return 0.0
    return (alpha + framed_bytes(framing, raw, size / ranks)) * (2.0 * (ranks - 1.0))


# Two ways to split a model over equal cards that only read memory


def tensor_parallel_token(decode, cards, link):
    """One token with every matrix split over the cards, and two ring all-reduces in each layer."""
    exchange = all_reduce("ring", cards, decode.hidden * ACTIVATION, link)
    return decode.read / (max(cards, 1) * decode.memory_rate) + exchange * (2.0 * decode.layers)


def layer_split_token(decode, cards, link):
    """One token of one stream with whole layers on each card."""
    hop = link.alpha + decode.hidden * ACTIVATION / link.rate
    return decode.read / decode.memory_rate + hop * max(cards - 1, 0)


def layer_split_stage(decode, cards, link):
    """One card's part of a token in a layer split, with the hand-off to it."""
    hop = 0.0 if cards < 2 else link.alpha + decode.hidden * ACTIVATION / link.rate
    return decode.read / (max(cards, 1) * decode.memory_rate) + hop


def layer_split_streams(decode, cards, link, streams):
    """Tokens per second of all streams together in a layer split."""
    if streams < cards:
        return streams / layer_split_token(decode, cards, link)
    return 1.0 / layer_split_stage(decode, cards, link)


def break_even_alpha(decode, cards, link):
    """The step latency at which both splits take equally long for one stream; None for one card."""
    if cards < 2 or decode.layers == 0:
        return None
    free = link._replace(alpha=0.0)
    spare = layer_split_token(decode, cards, free) - tensor_parallel_token(decode, cards, free)
    return spare / ((cards - 1.0) * (4.0 * decode.layers - 1.0))


def pipeline_prefill(stages, pieces):
    """A prompt in equal pieces through a pipeline: `sum + (pieces - 1) max`."""
    return math.fsum(stages) + max(stages, default=0.0) * max(pieces - 1, 0)


def pipeline_bubble(stages, pieces):
    """The part of the time that equal stages stand idle: `(p-1) / (pieces + p - 1)`."""
    idle = max(stages - 1, 0)
    return idle / (max(pieces, 1) + idle)


# Points to compare with

FRAMINGS = (
    SPANKER._replace(payload=64),
    SPANKER._replace(payload=512),
    SPANKER,
    Framing(payload=4096, overhead=32, ack_bytes=8, ack_every=1, compensation=0.0),
)
LINKS = (Link(0.0, 2e-6, 492.66e6), Link(3.4e-6, 1.7e-6, 35e9), Link(12e-6, 60e-6, 100e6))
DECODES = (
    Decode(0.582e9, 22, 2048, 2e9),
    Decode(3.716e9, 32, 4096, 2e9),
    Decode(38.65e9, 80, 8192, 1.5e12),
)
RANKS = (1, 2, 3, 4, 5, 8, 13, 64)
SIZES = (0, 1, 4096, 5000, 1 << 20, 1 << 26)
RATES = (125_000_000, 375_000_000, 500_000_000)
ERRORS = (0.0, 1e-9, 1e-7, 1e-6, 1e-5, 1e-3)
STAGES = ((0.25,), (0.1, 0.2, 0.3), (1e-3, 7e-3, 2e-3, 2.5e-3))

GRID = (
    (efficiency, {"framing": FRAMINGS}),
    (frame_error_rate, {"framing": FRAMINGS, "ber": ERRORS}),
    (go_back_n, {"framing": FRAMINGS, "raw": RATES, "ber": ERRORS, "round_trip": (1.07e-6, 2.9e-6)}),
    (goodput, {"framing": FRAMINGS, "raw": RATES, "ber": ERRORS, "round_trip": (1.52e-6, 63e-6)}),
    (
        round_trip,
        {"framing": FRAMINGS, "raw": RATES, "payload": (0, 64, 2048), "pipeline": (0.349e-6, PIPELINE)},
    ),
    (framed_bytes, {"framing": FRAMINGS, "raw": RATES, "size": SIZES}),
    (
        saturation,
        {
            "error_rate": (0.0, 0.01, 0.02, 0.05, 0.07, 0.1, 0.2),
            "failed_trainings": (0, 2, 3),
            "lanes": (1, 2, 4),
        },
    ),
    (all_reduce, {"algorithm": ALGORITHMS, "ranks": RANKS, "size": SIZES, "link": LINKS}),
    (star_all_reduce, {"ranks": RANKS, "size": SIZES, "link": LINKS}),
    (ring_all_gather, {"ranks": RANKS, "size": SIZES, "link": LINKS}),
    (
        framed_ring_all_reduce,
        {"ranks": RANKS, "size": SIZES, "framing": FRAMINGS, "raw": (RAW,), "alpha": (1e-6, 10e-6)},
    ),
    (tensor_parallel_token, {"decode": DECODES, "cards": RANKS, "link": LINKS}),
    (layer_split_token, {"decode": DECODES, "cards": RANKS, "link": LINKS}),
    (layer_split_stage, {"decode": DECODES, "cards": RANKS, "link": LINKS}),
    (layer_split_streams, {"decode": DECODES, "cards": RANKS, "link": LINKS, "streams": (1, 4, 100)}),
    (break_even_alpha, {"decode": DECODES, "cards": RANKS, "link": LINKS}),
    (pipeline_prefill, {"stages": STAGES, "pieces": (1, 2, 16)}),
    (pipeline_bubble, {"stages": (1, 2, 8), "pieces": (1, 2, 16)}),
)
"""Every function with the values that each of its arguments takes."""


def grid():
    """Every function at every combination of its values, as dictionaries."""

    def plain(value):
        return value._asdict() if hasattr(value, "_asdict") else value

    for function, values in GRID:
        for point in itertools.product(*values.values()):
            arguments = dict(zip(values, point))
            shown = {name: plain(value) for name, value in arguments.items()}
            yield {"function": function.__name__, "in": shown, "out": function(**arguments)}


# The command


def number(text, least=0.0, most=math.inf):
    """A finite number of at least `least` and less than `most`, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and least <= value < most):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from {least} to below {most}")
    return value


def count(least, most):
    """A parser of whole numbers from `least` to `most`, for argparse."""

    def parse(text):
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            problem = f"'{text}' is not a whole number from {least} to {most}"
            raise argparse.ArgumentTypeError(problem)
        return value

    return parse


def positive(text):
    """A finite number above zero, for argparse."""
    value = number(text)
    if value == 0.0:
        raise argparse.ArgumentTypeError(f"'{text}' is not above zero")
    return value


def arguments():
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description="Figures of the inter-card link.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("table", help="payload rates and ring all-reduces of the profile rev-a")
    commands.add_parser("grid", help="every function at many points, as JSON lines")

    reduce = commands.add_parser("all-reduce", help="the time of one all-reduce, in microseconds")
    reduce.add_argument("--ranks", type=count(1, 1024), required=True)
    reduce.add_argument("--bytes", type=count(0, 1 << 60), required=True, help="on each rank")
    reduce.add_argument("--algorithm", choices=(*ALGORITHMS, "star"), default="ring")
    reduce.add_argument("--base", type=number, default=0.0, help="seconds [0]")
    reduce.add_argument("--alpha", type=number, default=ALPHA, help="seconds for each step [2e-6]")
    rate = goodput(SPANKER, RAW, 0.0, ROUND_TRIP)
    reduce.add_argument("--rate", type=positive, default=rate, help="bytes per second [492.66e6]")

    good = commands.add_parser("goodput", help="payload rate of frames, in bytes per second")
    good.add_argument("--payload", type=count(1, 1 << 20), default=SPANKER.payload)
    bit_errors = lambda text: number(text, most=0.5)  # noqa: E731
    good.add_argument("--ber", type=bit_errors, default=0.0, help="bit error rate [0]")
    good.add_argument("--raw", type=count(1, 10**18), default=RAW, help="bytes per second [500000000]")
    help_text = "seconds there and back at the MAC [1.52e-6]"
    good.add_argument("--round-trip", type=number, default=ROUND_TRIP, help=help_text)
    return parser


def table():
    """The lines of the two main tables."""
    yield "payload rate, MB/s"
    yield f"{'payload':>10}" + "".join(f"{f'BER {ber:g}':>12}" for ber in (0.0, 1e-7, 1e-6, 1e-5))
    for payload in (64, 256, 512, 1024, 2048, 4096):
        framing = SPANKER._replace(payload=payload)
        rates = (goodput(framing, RAW, ber, ROUND_TRIP) / 1e6 for ber in (0.0, 1e-7, 1e-6, 1e-5))
        yield f"{payload:>10}" + "".join(f"{rate:>12.1f}" for rate in rates)
    yield ""
    yield "ring all-reduce, us"
    yield f"{'bytes':>10}" + "".join(f"{f'{ranks} cards':>12}" for ranks in (2, 4, 8))
    link = Link(0.0, ALPHA, goodput(SPANKER, RAW, 0.0, ROUND_TRIP))
    for size in (1 << 12, 1 << 13, 1 << 14, 1 << 20, 1 << 22, 1 << 24, 1 << 26):
        times = (all_reduce("ring", ranks, size, link) * 1e6 for ranks in (2, 4, 8))
        yield f"{size:>10}" + "".join(f"{time:>12.1f}" for time in times)


def main(given=None):
    """Runs the command; a wrong argument exits with 2 and a message."""
    args = arguments().parse_args(given)
    if args.command == "table":
        lines = table()
    elif args.command == "grid":
        # Python writes a float with as many digits as it takes to read the same float back.
        lines = (json.dumps(point, allow_nan=False) for point in grid())
    elif args.command == "goodput":
        framing = SPANKER._replace(payload=args.payload)
        lines = [f"{goodput(framing, args.raw, args.ber, args.round_trip):.0f} B/s"]
    else:
        link = Link(args.base, args.alpha, args.rate)
        if args.algorithm == "star":
            time = star_all_reduce(args.ranks, args.bytes, link)
        else:
            time = all_reduce(args.algorithm, args.ranks, args.bytes, link)
        lines = [f"{time * 1e6:.3f} us"]
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough; nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
