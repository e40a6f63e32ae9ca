#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the comparison in what `spanker run --compare --json` printed: every card is there, and causes add up.

    spanker run .. --compare --json | scripts/check_comparison.py CARDS [TRACE]

With the file of `--trace`, every card must have done something in it, in both processes. Before it looks, it plants each
fault that it is for in a copy, and must find it.
"""
import copy
import json
import sys


def wrong(run, cards):
    """What is wrong with a run's comparison, or nothing."""
    comparison = run.get("compare")
    if comparison is None:
        return "there is no comparison"
    found = sorted(card["card"] for card in comparison["cards"])
    if found != list(range(cards)):
        return f"cards {found} are compared, and {cards} ran"
    if comparison["left_out"]:
        return f"steps were left out: {comparison['left_out']}"
    gaps = [("whole", comparison["whole"])]
    gaps += [(f"card {card['card']}", card) for card in comparison["cards"]]
    gaps += [(f"token {step['token']}", step) for step in comparison["steps"]]
    for name, gap in gaps:
        causes = dict(gap["causes"])
        total = sum(causes.pop("waiting_for_card_ms").values()) + sum(causes.values())
        if abs(total - gap["gap_ms"]) > 1e-6 + 1e-9 * abs(gap["measured_ms"]):
            return f"{name}: causes add up to {total} ms, and the gap is {gap['gap_ms']} ms"
        if gap["attributed_percent"] < 95:
            return f"{name}: {gap['attributed_percent']} % of the gap have a cause"
    return None


def missing(trace, cards):
    """What a trace of predicted and measured lacks, or nothing."""
    slices = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    processes = {event["pid"] for event in slices}
    if len(processes) != 2:
        return f"processes {sorted(processes)}: predicted and measured are two"
    for process in processes:
        found = {event["tid"] for event in slices if event["pid"] == process}
        if len(found) != cards:
            return f"process {process} has threads {sorted(found)}, and {cards} cards ran"
    return None


def plant(run, cards):
    """Every fault that `wrong` is for, in a copy."""
    def changed(change):
        other = copy.deepcopy(run)
        change(other)
        return other

    yield "no comparison", changed(lambda run: run.pop("compare"))
    yield "a card missing", changed(lambda run: run["compare"]["cards"].pop())

    def more(run):
        run["compare"]["cards"][cards - 1]["causes"]["compute_ms"] += 0.5

    yield "a cause too large", changed(more)

    def unexplained(run):
        run["compare"]["whole"]["attributed_percent"] = 90

    yield "a gap without causes", changed(unexplained)


def main():
    cards = int(sys.argv[1])
    run = json.loads(sys.stdin.read().strip().splitlines()[-1])
    problem = wrong(run, cards)
    if problem is None:
        for fault, planted in plant(run, cards):
            if wrong(planted, cards) is None:
                problem = f"the planted fault was not found: {fault}"
    if problem is None and len(sys.argv) > 2:
        with open(sys.argv[2], encoding="utf-8") as file:
            trace = json.load(file)
        problem = missing(trace, cards)
        if problem is None:
            slices = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
            one = min(event["tid"] for event in slices)
            alone = {"traceEvents": [event for event in slices if event["tid"] == one]}
            if cards > 1 and missing(alone, cards) is None:
                problem = "a trace of one card alone was not found"
    if problem is not None:
        sys.exit(f"check_comparison: {problem}")


if __name__ == "__main__":
    main()
