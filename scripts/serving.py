# SPDX-License-Identifier: Apache-2.0
"""A `spanker serve` on this machine and clients of it, for scripts that check it. No checks are in here."""
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time

PATIENCE = 180
# Open MPI refuses root and more ranks than cores unless it is told.
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}


class Server:
    """A server that runs until the end of a `with`."""

    def __init__(self, binary, model, *flags, launcher=(), environment=None):
        command = [*launcher, binary, "serve", "-m", model, "--port", "0", *map(str, flags)]
        environment = {**os.environ, **MPI, **(environment or {})}
        self.said, self.process = "", subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
        try:
            self.host, self.port = self.wait_until_it_listens()
            threading.Thread(target=self.listen, daemon=True).start()
            self.wait_until_ready()
        except BaseException:
            self.process.kill()
            raise

    def wait_until_it_listens(self):
        end, stderr = time.monotonic() + PATIENCE, self.process.stderr.fileno()
        while time.monotonic() < end:
            if select.select([stderr], [], [], 1)[0]:
                more = os.read(stderr, 1 << 16)
                self.said += more.decode(errors="replace")
                found = re.search(r"listening on (\S+):(\d+);", self.said)
                if found:
                    return found.group(1), int(found.group(2))
                if not more:
                    break
        raise RuntimeError(f"the server does not listen: {self.said}")

    def listen(self):
        """Reads what it says, so that it never waits for that."""
        while more := os.read(self.process.stderr.fileno(), 1 << 16):
            self.said = (self.said + more.decode(errors="replace"))[-100_000:]

    def wait_until_ready(self):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            if self.get("/health")[0] == 200:
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server is not ready: {self.said}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self, how=signal.SIGTERM):
        """Tells it to end. Gives its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def connect(self, timeout=PATIENCE):
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def socket(self, timeout=PATIENCE):
        return socket.create_connection((self.host, self.port), timeout)

    def get(self, path):
        """The status and the text of an answer."""
        connection = self.connect()
        try:
            connection.request("GET", path, headers={"connection": "close"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def status(self):
        return json.loads(self.get("/status")[1])

    def post(self, path, body, timeout=PATIENCE):
        """The status, the headers and the JSON of an answer."""
        connection = self.connect(timeout)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, data, {"content-type": "application/json", "connection": "close"})
            answer = connection.getresponse()
            return answer.status, answer.headers, json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def stream(self, path, body, on_piece=None):
        """An answer piece by piece: its text, how it ended, and when each piece came. An error is raised."""
        connection, text, finish, times = self.connect(), "", None, [time.monotonic()]
        try:
            data = json.dumps({**body, "stream": True})
            connection.request("POST", path, data, {"content-type": "application/json", "connection": "close"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {answer.read()[:500]}")
            done = False
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the stream says {event['error']}")
                for choice in event["choices"]:
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                    finish = choice["finish_reason"] or finish
                times.append(time.monotonic())
                if on_piece:
                    on_piece(len(times) - 1)
            if not done or finish is None:
                raise RuntimeError("the stream ends without its end")
            return text, finish, times
        finally:
            connection.close()

    def metric(self, name):
        text = self.get("/metrics")[1]
        return float(re.search(rf"^{name} (\S+)$", text, re.M).group(1))

    def memory(self):
        """Bytes that it has in memory, and threads and files that it has open."""
        base = f"/proc/{self.process.pid}"
        with open(f"{base}/status", encoding="ascii") as file:
            status = dict(line.split(":", 1) for line in file.read().splitlines())
        private = int(status["RssAnon"].split()[0]) * 1024
        return private, int(status["Threads"]), len(os.listdir(f"{base}/fd"))

    def wait_until(self, what, found, patience=60):
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if found():
                return
            time.sleep(0.01)
        raise RuntimeError(f"{what}: not within {patience} s")


def together(count, work, items):
    """Does `work` for all items, so many at the same time. Gives what came of each, in order; an error is the result."""
    results, lock, left = [None] * len(items), threading.Lock(), iter(range(len(items)))

    def lane():
        while True:
            with lock:
                at = next(left, None)
            if at is None:
                return
            try:
                results[at] = work(items[at])
            except Exception as error:  # pylint: disable=broad-except # whoever asked judges it
                results[at] = error

    lanes = [threading.Thread(target=lane) for _ in range(count)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    return results


def part(values, share):
    """The value below which so much of them is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
