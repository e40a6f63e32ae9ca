# SPDX-License-Identifier: Apache-2.0
"""A browser without a screen, over the WebDriver protocol, for checks of pages."""
import base64
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

PATIENCE = 60
NARROW, WIDE = (390, 844), (1280, 900)


def until(what, found, patience=PATIENCE):
    """What `found` finds, once it finds something."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        time.sleep(0.02)
    sys.exit(f"check-page: {what}: not within {patience} s")


def check(what, holds):
    print(f"{'ok' if holds else 'FAIL':4} {what}", flush=True)
    if not holds:
        sys.exit(1)


def call(url, method="GET", body=None, headers=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"check-page: {method} {url}: {error.read().decode(errors='replace')[:2000]}")


class Browser:
    """A browser without a screen."""

    def __init__(self):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = iter(self.driver.stdout.readline, "")
        port = next(found.group(1) for line in lines if (found := re.search(r"started successfully on port (\d+)", line)))
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        asked = {"capabilities": {"alwaysMatch": options}}
        self.base = f"http://127.0.0.1:{port}/session"
        self.base += "/" + call(self.base, "POST", asked)["value"]["sessionId"]

    def ask(self, path, body):
        return call(f"{self.base}/{path}", "POST", body)["value"]

    def close(self):
        call(self.base, "DELETE")
        self.driver.terminate()

    def go(self, url):
        self.ask("url", {"url": url})

    def run(self, script, *args):
        return self.ask("execute/sync", {"script": script, "args": list(args)})

    def run_async(self, script, *args):
        return self.ask("execute/async", {"script": script, "args": list(args)})

    def element(self, selector):
        found = self.ask("element", {"using": "css selector", "value": selector})
        return next(iter(found.values()))

    def type(self, selector, text):
        self.ask(f"element/{self.element(selector)}/value", {"text": text})

    def click(self, selector):
        self.ask(f"element/{self.element(selector)}/click", {})

    def press(self, key):
        keys = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self.ask("actions", {"actions": [{"type": "key", "id": "keys", "actions": keys}]})

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def look(self, size, scheme):
        """A screen of this size, and whether it is dark."""
        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": screen})
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.ask("goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": media})

    def shot(self, folder, name):
        if folder:
            with open(os.path.join(folder, name + ".png"), "wb") as file:
                file.write(base64.b64decode(call(f"{self.base}/screenshot")["value"]))

    def complaints(self):
        """What the browser has to say against the page: errors, and what its policy has forbidden."""
        entries = self.ask("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]
