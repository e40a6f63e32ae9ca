#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The pages of `spanker report` in a real browser. See scripts/check-page."""
import json
import os
import subprocess
import sys
import tempfile
import time

from browser import NARROW, WIDE, Browser, check

# Of a page, in bytes.
MOST = 1_000_000
ARROWS = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015"}


def spanker(binary, *words, code=0):
    ran = subprocess.run([binary, *words], capture_output=True, text=True)
    if ran.returncode != code:
        sys.exit(f"check-page: spanker {' '.join(words)}: exit code {ran.returncode}: {ran.stderr}")
    return ran.stdout


def opened(browser, path):
    """Opens a page, and says how long that took in milliseconds."""
    browser.go("file://" + path)
    check(f"{os.path.basename(path)} draws itself", browser.run("return document.documentElement.dataset.ready") == "yes")
    return browser.run("return performance.timing.domContentLoadedEventEnd - performance.timing.navigationStart")


def data(browser):
    return json.loads(browser.text("#data"))


def sound(browser, path):
    size = os.path.getsize(path)
    check(f"{os.path.basename(path)} has {size} bytes", size <= MOST)
    check("it fetches nothing", browser.run("return performance.getEntriesByType('resource').length") == 0)
    outside = "return [...document.querySelectorAll('[src],[href]')].map((e) => e.getAttribute('src') ?? e.getAttribute('href')).filter((u) => !u.startsWith('#'))"
    check("and leads nowhere", browser.run(outside) == [])
    unnamed = "return [...document.querySelectorAll('button,select,input,canvas')].filter((e) => !e.textContent && !e.ariaLabel && !e.labels?.length).length"
    check("every control has a name", browser.run(unnamed) == 0)
    complaints = browser.complaints()
    check(f"no complaints of the browser {complaints}", not complaints)


def planned(browser, binary, folder, shots):
    """A plan of four cards: why it is not four times as fast, and what would change it."""
    path = os.path.join(folder, "plan.html")
    words = ["tinyllama-1.1b", "--quant", "q4_0", "--profile", "rev-a", "--topology", "ring"]
    spanker(binary, "plan", *words, "--cards", "4", "--report", path)
    opened(browser, path)
    plan = json.loads(spanker(binary, "plan", *words, "--cards", "4", "--json"))
    best, one = plan["candidates"][0], next(c for c in plan["candidates"] if c["strategy"] == "one-card")
    speedup = one["decode_ms_per_token"] / best["decode_ms_per_token"]
    check("the page says how many times as fast four cards are", f"4 cards are {speedup:.2f} and not 4 times" in browser.text("#speedup"))
    rows = browser.run("return [...document.querySelectorAll('#scaling .falls > span:last-child, #scaling .falls > span')].length")
    check("with a waterfall", rows > 6)
    terms = browser.run("""
        const own = JSON.parse(document.getElementById('data').textContent).own, t = own.terms;
        return Math.abs(t.memory_ms + t.compute_ms + t.communication_ms + t.fixed_ms + own.waiting_ms - own.decode_ms_per_token) / own.decode_ms_per_token""")
    check("whose parts are the whole", terms < 1e-6)
    check("every card has a row of the split", browser.run("return document.querySelectorAll('#layout .cell').length") == 4)
    check("and its memory", "GB free" in browser.text("#memory"))
    # What-ifs against plans that are made anew.
    axes = [axis["name"] for axis in data(browser)["scenarios"]["axes"]]
    for axis, choice, changed in [("cards", "5 cards", ["--cards", "5"]), ("weights", "q8_0", ["--cards", "4", "--quant", "q8_0"]),
                                  ("at the same time", "16 sequences", ["--cards", "4", "--objective", "throughput", "--concurrency", "16", "--copies"])]:
        picker = f"#if-{axes.index(axis)}"
        browser.run("const e = document.querySelector(arguments[0]); e.value = [...e.options].find((o) => o.text === arguments[1]).value; e.dispatchEvent(new Event('change'))", picker, choice)
        again = [word for i, word in enumerate(words) if not ("--quant" in changed and (word == "--quant" or words[i - 1] == "--quant"))]
        anew = json.loads(spanker(binary, "plan", *again, *changed, "--json"))["candidates"][0]["tokens_per_second"]
        said = float(browser.text("#answer b").split()[0])
        check(f"what if {choice}: {said} tokens/s, planned anew {anew:.2f}", abs(said / anew - 1) <= 0.02)
        browser.run("document.querySelector('#scenarios button').click()")
    keyboard(browser)
    browser.shot(shots, "report-plan")
    sound(browser, path)
    for size, scheme in [(NARROW, "light"), (NARROW, "dark"), (WIDE, "dark")]:
        browser.look(size, scheme)
        check(f"a screen {size[0]} wide has room ({scheme})", browser.run("return document.documentElement.scrollWidth <= window.innerWidth"))
        browser.shot(shots, f"report-{size[0]}-{scheme}")
    browser.look(WIDE, "light")


def keyboard(browser):
    """The timeline by keys alone."""
    browser.run("document.querySelector('canvas').focus()")
    browser.press(ARROWS["right"])
    first = browser.text("#mark")
    browser.press(ARROWS["right"])
    check("arrow keys go from mark to mark", first != browser.text("#mark") and "predicted" in browser.text("#mark"))
    browser.press("+")
    browser.press("0")
    browser.run("const e = document.getElementById('step'); e.value = '1'; e.dispatchEvent(new Event('change'))")
    browser.run("document.getElementById('search').focus()")
    browser.type("#search", "exchange layer 3")
    check("a search finds marks", int(browser.text("#found").split()[0]) > 0)
    check("of that layer", "exchange of layer 3" in browser.text("#mark"))


def ran(browser, binary, folder, shots):
    """A run beside its prediction."""
    model, path, saved = (os.path.join(folder, name) for name in ["x.gguf", "run.html", "both.json"])
    small = "--hidden 256 --heads 4 --kv-heads 2 --ffn 512 --layers 6 --vocab 300 --context 256 --quant q8_0".split()
    spanker(binary, "synth", "llama", *small, "--out", model)
    answer = json.loads(spanker(binary, "run", "-m", model, "-p", "abc", "-n", "8", "--cards", "2", "--split", "gather", "--temp", "0",
                                "--ignore-eos", "--report", path, "--trace", saved, "--compare", "--json"))
    opened(browser, path)
    whole = data(browser)["comparison"]["whole"]
    check("the page has the run's comparison", abs(whole["gap_ms"] - answer["compare"]["whole"]["gap_ms"]) < 1e-6)
    check("drawn from predicted to measured", not browser.run("return document.getElementById('difference').hidden"))
    traces = data(browser)["timeline"]["traces"]
    check("two lanes for each card", [trace["name"] for trace in traces] == ["predicted", "measured"] and all(trace["lanes"] for trace in traces))
    keyboard_lanes = "const e = document.querySelector('canvas'); e.focus()"
    browser.run(keyboard_lanes)
    browser.press(ARROWS["right"])
    browser.press(ARROWS["down"])
    check("down leads to what was measured", browser.text("#mark").startswith("measured, card 0"))
    check("beside what was predicted", "; predicted" in browser.text("#mark"))
    browser.shot(shots, "report-run")
    sound(browser, path)


def large(browser, binary, folder, shots):
    """The plan of a large model on 64 cards."""
    path = os.path.join(folder, "large.html")
    spanker(binary, "plan", "llama-2-70b", "--quant", "q4_0", "--profile", "rev-a", "--cards", "64", "--topology", "ring", "--report", path)
    took = opened(browser, path)
    print(f"     opened in {took} ms")
    browser.shot(shots, "report-large")
    sound(browser, path)


def main():
    if len(sys.argv) < 2:
        sys.exit("check-page: give the binary, as in scripts/check-page target/debug/spanker")
    binary, shots = os.path.abspath(sys.argv[1]), sys.argv[3] if sys.argv[2:3] == ["--shots"] else None
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("SPANKER_CACHE", os.path.join(folder, "cache"))
        browser = Browser()
        try:
            browser.look(WIDE, "light")
            begun = time.monotonic()
            planned(browser, binary, folder, shots)
            ran(browser, binary, folder, shots)
            large(browser, binary, folder, shots)
            print(f"     {time.monotonic() - begun:.0f} s")
        finally:
            browser.close()
    print("reports work in a browser")


if __name__ == "__main__":
    main()
