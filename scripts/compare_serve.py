#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What clients of `spanker serve` see beside clients of llama.cpp's server, on the same file, in turns.

Both servers run all the time; only one is asked at a time. Every turn has prompts of its own, the same for both. Medians
over the turns are printed, and how many times as good ours is.
"""
import argparse
import json
import os
import re
import select
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)


class Server:
    """A server on this machine, until the end of a `with`."""

    def __init__(self, command, pattern):
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.url = self.find(re.compile(pattern))

    def find(self, pattern):
        seen, end = b"", time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            if select.select([self.process.stdout], [], [], 1)[0]:
                seen += os.read(self.process.stdout.fileno(), 1 << 16)
                found = pattern.search(seen.decode(errors="replace"))
                if found:
                    return found.group(1)
        self.process.kill()
        raise SystemExit(f"{self.process.args[0]} did not start:\n{seen.decode(errors='replace')[-2000:]}")

    def __enter__(self):
        # What it says later is read, so that it does not wait for that.
        self.drain = subprocess.Popen(["cat"], stdin=self.process.stdout, stdout=subprocess.DEVNULL)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.drain.terminate()


def wait_ready(url):
    import urllib.error
    import urllib.request

    for _ in range(600):
        try:
            with urllib.request.urlopen(url + "/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"{url} is not ready after a minute")


def measure(args, url, clients, seed):
    command = [args.spanker, "bench", "serve", "-m", args.model, "--url", url, "--clients", str(clients), "-r", str(args.requests)]
    command += ["-p", str(args.prompt), "-n", str(args.answer), "--shared", str(args.shared), "--seed", str(seed), "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    row = json.loads(done.stdout)
    return {
        "tokens/s": row["tokens_per_second"],
        "first p50": row["first"]["p50_ms"],
        "first p99": row["first"]["p99_ms"],
        "between p50": row["between"]["p50_ms"],
        "between p99": row["between"]["p99_ms"],
    }


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--spanker", default=os.path.join(ROOT, "target/release/spanker"))
    flags.add_argument("--peer-python", default=sys.executable)
    flags.add_argument("-m", "--model", required=True, help="a .gguf file")
    flags.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    flags.add_argument("--clients", default="1,4,16")
    flags.add_argument("-r", "--requests", type=int, default=2, help="of each client, in a turn")
    flags.add_argument("-p", "--prompt", type=int, default=40, help="tokens")
    flags.add_argument("-n", "--answer", type=int, default=48, help="tokens")
    flags.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    flags.add_argument("--turns", type=int, default=5)
    args = flags.parse_args()
    room = args.prompt + args.answer + 64
    peer = [args.peer_python, os.path.join(HERE, "serve_llama_cpp.py"), args.model, "-t", str(args.threads), "-c", str(room)]
    own = [args.spanker, "serve", "-m", args.model, "-t", str(args.threads), "-c", str(room), "--port", "0"]
    with Server(peer, r"(?m)^(http://127\.0\.0\.1:\d+)\s") as theirs, Server(own, r"(http://127\.0\.0\.1:\d+)") as ours:
        urls = {"llama.cpp": theirs.url, "spanker": ours.url}
        for url in urls.values():
            wait_ready(url)
            measure(args, url, 2, 999_983)
        print("| clients | server | tokens/s | first token, median / p99, ms | between tokens, median / p99, ms |")
        print("|---|---|---|---|---|")
        for clients in map(int, args.clients.split(",")):
            seen = {name: [] for name in urls}
            for turn in range(args.turns):
                order = list(urls.items())[:: 1 if turn % 2 else -1]
                for name, url in order:
                    seen[name].append(measure(args, url, clients, 1000 * clients + turn))
            middle = {
                name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in seen.items()
            }
            for name, row in middle.items():
                print(
                    f"| {clients} | {name} | {row['tokens/s']:.1f} | {row['first p50']:.0f} / {row['first p99']:.0f} "
                    f"| {row['between p50']:.1f} / {row['between p99']:.1f} |"
                )
            a, b = middle["spanker"], middle["llama.cpp"]
            print(
                f"| {clients} | times as good | {a['tokens/s'] / b['tokens/s']:.2f} "
                f"| {b['first p50'] / a['first p50']:.2f} / {b['first p99'] / a['first p99']:.2f} "
                f"| {b['between p50'] / a['between p50']:.2f} / {b['between p99'] / a['between p99']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
