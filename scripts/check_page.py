#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The page of `spanker serve` in a real browser, over the WebDriver protocol. See scripts/check-page."""
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from browser import NARROW, PATIENCE, WIDE, Browser, call, check, until

# Slow enough to be stopped in the middle of an answer.
SLOW = "--hidden 512 --heads 8 --kv-heads 8 --ffn 2048 --layers 24 --vocab 300 --context 2048 --quant q8_0".split()
# A model with random weights would end its answers by chance.
ENDLESS = """
    const asked = window.fetch;
    const endless = (body) => JSON.stringify({ ...JSON.parse(body), ignore_eos: true });
    window.fetch = (path, options) => asked(path, options?.body ? { ...options, body: endless(options.body) } : options);
"""
# For cards that are emulated: slow enough to be lost in the middle of an answer.
SMALL = "--hidden 256 --heads 4 --kv-heads 4 --ffn 512 --layers 6 --vocab 300 --context 2048 --quant q8_0".split()


class Server:
    """`spanker serve` at a port of its own."""

    def __init__(self, spanker, model, *flags):
        words = [spanker, "serve", "-m", model, "--port", "0", *flags]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        line = self.process.stderr.readline()
        found = re.search(r"the page is (\S+)", line)
        if not found:
            sys.exit(f"check-page: {line}{self.process.stderr.read()}")
        self.url = found.group(1)

        def is_well():
            try:
                with urllib.request.urlopen(self.url + "health", timeout=PATIENCE):
                    return True
            except urllib.error.HTTPError:
                return False

        until("a server that is well", is_well)

    def status(self):
        return call(self.url + "status")

    def end(self):
        self.process.send_signal(2)
        return self.process.wait(timeout=PATIENCE)


def chat(browser, server, shots):
    browser.go(server.url)
    until("the model's name", lambda: "x" in browser.text("#model"))
    check("the page has a title", browser.run("return document.title") == "Spanker")
    check("the message field has the focus", browser.run("return document.activeElement.id") == "text")
    browser.type("#text", "Hello, <b>cards</b>\ue007")
    answer = "#log .turn.assistant .said"
    first = until("the first words", lambda: browser.text(answer))
    until("more of them", lambda: len(browser.text(answer)) > len(first) + 3)
    check("an answer streams", browser.run("return !document.getElementById('stop').disabled"))
    browser.shot(shots, "streaming")
    browser.click("#stop")
    until("the end of the answer", lambda: "stopped" in browser.text("#log .turn.assistant .speed"))
    until("the end of it at the server", lambda: server.status()["running"] == 0)
    stopped = browser.text(answer)
    time.sleep(0.3)
    check("a stopped answer stays as it is", browser.text(answer) == stopped)
    check("what was said is shown as text", "<b>cards</b>" in browser.text("#log .turn.user"))
    check("and is no markup", not browser.run("return document.querySelector('#log b')"))
    browser.click("#settings summary")
    browser.run("document.getElementById('tokens').value = 12")
    browser.type("#text", "Again\ue007")
    until("a short answer", lambda: "12 tokens" in browser.text("#log .turn:last-child .speed"))
    # From the keyboard alone: Escape stops an answer.
    browser.run("document.getElementById('tokens').value = 1000")
    browser.type("#text", "And again\ue007")
    until("a third answer", lambda: browser.text("#log .turn:last-child .said"))
    browser.press("\ue00c")
    until("the end of the third answer", lambda: "stopped" in browser.text("#log .turn:last-child .speed"))
    check("the focus is back at the message", browser.run("return document.activeElement.id") == "text")
    browser.shot(shots, "chat")
    browser.click("#clear")
    check("a conversation is cleared", browser.run("return document.querySelectorAll('.turn').length") == 0)


def status(lost):
    """A status of six cards in two stages, one of which may be lost."""
    state = lambda card: "lost" if card in lost else "idle" if card == 6 else "serving"
    cards = [
        {
            "number": card, "profile": "rev-a" if card != 2 else "rev-b with a longer name", "state": state(card), "copy": 0,
            "stage": card // 3, "layers": [card // 3 * 16, card // 3 * 16 + 16], "heads": [8, 24],
            "bytes": {"weights": 1.2e9, "kv": 3.1e8, "buffers": 4e7}, "capacity": 4.29e9, "busy": 0.35 + card / 12,
            "waiting": 0.5 - card / 12,
        }
        for card in range(7)
    ]
    return {
        "state": "ready", "model": "llama-3-8b", "version": "0.2.0", "layout": "tensor-pipeline", "fabric": "cards", "parallel": 16,
        "cards": cards, "links": [[0, 1], [1, 2], [0, 2], [2, 3], [3, 4], [4, 5], [3, 5], [5, 6]], "running": 7, "waiting": 2,
        "answered": 1234, "tokens": 987654, "prompt_tokens": 345678, "cached_tokens": 123456, "recomputed": len(lost),
        "step_ms": {"measured": 18.4, "predicted": 17.9}, "tokens_per_second": {"measured": 312.5, "predicted": 340},
        "kv_blocks": {"total": 512, "used": 230, "cached": 120, "tokens": 16}, "broken": None,
        "expected": [{"clients": 1, "tokens_per_second": 54.2}, {"clients": 16, "tokens_per_second": 410}],
    }


def show(browser, what):
    script = "const done = arguments[1]; import('./cards.js').then((m) => { m.show(arguments[0]); done(null); }, (e) => done(String(e)));"
    failed = browser.run_async(script, what)
    if failed:
        sys.exit(f"check-page: {failed}")


def cards(browser, server, shots):
    # The page no longer asks by itself: what is drawn is what the test says.
    browser.go(server.url)
    until("the model's name", lambda: "x" in browser.text("#model"))
    browser.run("window.fetch = () => new Promise(() => {})")
    time.sleep(1.2)
    show(browser, status(lost=[]))
    check("every card is drawn", browser.run("return document.querySelectorAll('#drawing g').length") == 7)
    check("links are drawn", browser.run("return document.querySelectorAll('#drawing .link').length") == 8)
    check("cards are listed", browser.run("return document.querySelectorAll('#table tbody tr').length") == 7)
    check("cards do not lie on each other", not browser.run("""
        const boxes = [...document.querySelectorAll('#drawing .box')].map((box) => box.getBoundingClientRect());
        return boxes.some((a, i) => boxes.some((b, j) => i < j && a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom))
    """))
    check("words stay in their boxes", browser.run("""
        return [...document.querySelectorAll('#drawing g')].every((card) => {
          const box = card.querySelector('.box').getBoundingClientRect();
          return [...card.querySelectorAll('text')].every((text) => text.getBoundingClientRect().right < box.right);
        })
    """))
    check("nothing is lost yet", browser.text("#notice") == "")
    browser.shot(shots, "cards")
    show(browser, status(lost=[4]))
    check("a lost card is said", "card 4" in browser.text("#notice"))
    check("when it is lost", "card 4 was lost" in browser.text("#events"))
    check("its links are gone", browser.run("return document.querySelectorAll('#drawing .link').length") == 6)
    browser.look(WIDE, "dark")
    browser.shot(shots, "lost-dark")
    hostile = status(lost=[])
    hostile["model"] = hostile["cards"][0]["profile"] = "<img src=x onerror=alert(1)>"
    show(browser, hostile)
    check("names are text", not browser.run("return document.querySelector('#cards img, #model img')"))
    fits = "return document.documentElement.scrollWidth <= window.innerWidth"
    for scheme in ["light", "dark"]:
        browser.look(NARROW, scheme)
        show(browser, status(lost=[4]))
        check(f"a phone has room for the chat ({scheme})", browser.run(fits))
        check("whose view of the cards says that one is lost", browser.text("#show-cards") == "Cards: 1 lost")
        browser.shot(shots, f"phone-chat-{scheme}")
        browser.click("#show-cards")
        check("and for the cards", browser.run(fits) and browser.run("return document.getElementById('chat').offsetParent === null"))
        browser.shot(shots, f"phone-cards-{scheme}")
        browser.click("#show-chat")
    browser.look(WIDE, "light")
    outside = "return performance.getEntriesByType('resource').map((entry) => entry.name).filter((name) => !name.startsWith(location.origin))"
    check("everything comes from the server", browser.run(outside) == [])


def death(browser, spanker, folder, shots):
    """A card of a twin dies while an answer streams, and comes back."""
    os.environ["SPANKER_DEV_DIR"] = os.path.join(folder, "devices")
    model = os.path.join(folder, "small.gguf")
    subprocess.run([spanker, "synth", "llama", *SMALL, "--out", model], check=True, stdout=subprocess.DEVNULL)

    def twin(*words):
        subprocess.run([spanker, "twin", *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    twin("up", "--cards", "4", "--profile", "rev-a", "--topology", "ring")
    server = None
    try:
        server = Server(spanker, model, "--fabric", "cards", "--split", "gather")
        browser.go(server.url)
        until("four cards that serve", lambda: browser.run("return document.querySelectorAll('#drawing g.serving').length") == 4)
        browser.click("#settings summary")
        browser.run("document.getElementById('tokens').value = 1900")
        browser.run(ENDLESS)
        browser.type("#text", "Go on\ue007")
        answer = "#log .turn.assistant .said"
        until("the first words", lambda: browser.text(answer))
        twin("kill", "2")
        until("a lost card in the drawing", lambda: browser.run("return document.querySelectorAll('#drawing g.lost').length") == 1)
        check("a card that dies is seen", "card 2" in browser.text("#notice") and "card 2 was lost" in browser.text("#events"))
        before = browser.text(answer)
        until("more of the answer", lambda: len(browser.text(answer)) > len(before) + 3)
        check("and the answer goes on", browser.run("return !document.getElementById('stop').disabled"))
        browser.shot(shots, "died")
        twin("restore")
        until("four cards that serve again", lambda: browser.run("return document.querySelectorAll('#drawing g.serving').length") == 4)
        check("a card that comes back is seen", "card 2 is back" in browser.text("#events") and browser.text("#notice") == "")
        until("the end of the answer", lambda: browser.run("return document.getElementById('stop').disabled"), 3 * PATIENCE)
        check("nothing of the answer is missing", "1900 tokens" in browser.text("#log .turn:last-child .speed"))
        browser.shot(shots, "back")
        check("the server of the twin ends in order", server.end() == 0)
    finally:
        if server:
            server.process.kill()
        twin("down")
        del os.environ["SPANKER_DEV_DIR"]


def key(browser, spanker, model, shots):
    server = Server(spanker, model, "--api-key", "open sesame")
    browser.go(server.url)
    until("a question for the key", lambda: browser.run("return document.getElementById('locked').open"))
    browser.shot(shots, "key")
    browser.type("#key", "wrong\ue007")
    until("another one", lambda: browser.run("return document.getElementById('locked').open && !document.getElementById('key').value"))
    browser.type("#key", "open sesame\ue007")
    until("the model's name", lambda: "one-card" in browser.text("#model"))
    check("a key opens the page", not browser.run("return document.getElementById('locked').open"))
    # What failed before the key was known are answers of 401.
    complaints = [one for one in browser.complaints() if "401" not in one]
    check(f"no complaints of the browser {complaints}", not complaints)
    server.end()


def main():
    if len(sys.argv) < 2:
        sys.exit("check-page: give the binary, as in scripts/check-page target/debug/spanker")
    spanker, shots = os.path.abspath(sys.argv[1]), sys.argv[3] if sys.argv[2:3] == ["--shots"] else None
    if shots:
        os.makedirs(shots, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("SPANKER_CACHE", os.path.join(folder, "cache"))
        model = os.path.join(folder, "x.gguf")
        subprocess.run([spanker, "synth", "llama", *SLOW, "--out", model], check=True, stdout=subprocess.DEVNULL)
        server = Server(spanker, model)
        browser = Browser()
        try:
            browser.look(WIDE, "light")
            chat(browser, server, shots)
            cards(browser, server, shots)
            complaints = browser.complaints()
            check(f"no complaints of the browser {complaints}", not complaints)
            check("the server ends in order", server.end() == 0)
            key(browser, spanker, model, shots)
            death(browser, spanker, folder, shots)
        finally:
            browser.close()
            server.process.kill()
    print("the page works in a browser")


if __name__ == "__main__":
    main()
