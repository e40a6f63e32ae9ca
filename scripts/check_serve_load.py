# SPDX-License-Identifier: Apache-2.0
"""Clients that go away, ask for nonsense, or ask for more than there is; and who is let in. Parts of check_serve.py."""
import http.client
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import tempfile
import threading
import time
import urllib.request

from serving import Server, part, together

# One step takes long enough to see what happens between two of them.
SLOW = "--hidden 512 --heads 8 --kv-heads 8 --ffn 2048 --layers 12 --vocab 300 --quant q8_0"
SMALL = "--hidden 64 --heads 4 --kv-heads 2 --ffn 96 --layers 4 --vocab 300 --quant q8_0"
# What may stay in memory after thousands of connections: fragments of the allocator.
MEMORY_GROWTH = 8 << 20


def model(options, folder, shape):
    path = os.path.join(folder, "x.gguf")
    made = [options.binary, "synth", "llama", *shape.split(), "--context", "8192", "--out", path]
    subprocess.run(made, check=True, capture_output=True)
    return path


def head(path, length):
    return (f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {length}\r\n\r\n").encode()


def give_up(server, number):
    """A client that goes away in the middle of something; every other one without a word."""
    body = json.dumps({"prompt": f"{number} words", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    whole = head("/v1/completions", len(body)) + body
    half = (len(whole) // 3, len(whole) - len(body) // 2, len(whole), len(whole))[number % 4]
    try:
        with server.socket(20) as connection:
            connection.sendall(whole[:half])
            if number % 4 == 3:
                connection.recv(1000)
            if number % 8 >= 4:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except (ConnectionError, TimeoutError):
        # It was turned away.
        pass


def leaks(checks):
    """Clients that go away: their blocks are free within a step, and nothing is left of thousands of them."""
    options = checks.options
    with tempfile.TemporaryDirectory() as folder:
        with Server(options.binary, model(options, folder, SLOW), "-c", 2048, "--parallel", 4) as server:
            steps = [steps_until_free(server, options.plant) for _ in range(10)]
        checks.check(f"blocks of a client that has gone are free after {min(steps)} to {max(steps)} steps that it was not in",
                     max(steps) <= 1)
        path = model(options, folder, SMALL)
        with Server(options.binary, path, "-c", 512, "--parallel", 16, "--max-queue", 400) as server:
            numbers = iter(range(options.connections + 1000))

            def settle():
                server.wait_until("nothing is under way", lambda: not sum(server.status()[key] for key in ("running", "waiting")))
                server.wait_until("connections have ended", lambda: server.metric("spanker_connections") <= 1)
                time.sleep(0.5)
                return server.memory()

            held = []
            together(16, lambda _: give_up(server, next(numbers)), range(1000))
            before = settle()
            if options.plant:
                held = [server.socket() for _ in range(100)]
                server.wait_until = lambda *_: None
            begun = time.monotonic()
            seen = server.metric("spanker_connections_total"), server.metric("spanker_prompt_tokens_total")
            came = together(16, lambda _: give_up(server, next(numbers)), range(options.connections))
            took = time.monotonic() - begun
            raised = [error for error in came if isinstance(error, Exception)]
            arrived = server.metric("spanker_connections_total") - seen[0]
            begun_prompts = server.metric("spanker_prompt_tokens_total") - seen[1]
            after, status = settle(), server.status()
            del held
            free = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        checks.check(f"{arrived:.0f} connections arrived in {took:.0f} s, {begun_prompts:.0f} tokens of their prompts were "
                     f"computed, {len(raised)} clients failed {raised[:1]}", arrived >= options.connections and not raised
                     and begun_prompts > options.connections / 10)
        said = f"{options.connections} clients that gave up: memory {before[0] >> 10} -> {after[0] >> 10} KiB, " \
               f"threads {before[1]} -> {after[1]}, files {before[2]} -> {after[2]}, blocks in use {status['kv_blocks']['used']}"
        flat = after[0] - before[0] <= MEMORY_GROWTH and after[1] <= before[1] + 1 and after[2] <= before[2] + 2
        checks.check(said, flat and status["kv_blocks"]["used"] == 0 and free)


def steps_until_free(server, stays):
    """Steps that began after a client went away and before its blocks were free, beside another one that goes on."""
    body = {"prompt": "abc" * 200, "max_tokens": 400, "ignore_eos": True, "stream": True, "cache_prompt": False}

    def begin(body):
        connection, data = server.socket(), json.dumps(body).encode()
        connection.sendall(head("/v1/completions", len(data)) + data)
        server.wait_until("its turn", lambda: connection.recv(4096).count(b"data: "))
        return connection

    other = begin({**body, "prompt": "x"})
    leaver = begin(body)
    before = server.status()
    if not stays:
        leaver.close()
    went, free, now = server.status()["steps"], before["kv_blocks"]["used"] // 2, None
    for _ in range(1000):
        now = server.status()
        if now["kv_blocks"]["used"] <= free or now["steps"] > went + 20:
            break
    leaver.close()
    other.close()
    server.wait_until("nothing runs", lambda: server.status()["running"] == 0)
    # The step under way when it went counts as its own.
    return max(0, now["steps"] - went - 1)


# What is wrong, and the field that the error has to name.
WRONG = [
    ({"prompt": 3}, 400, "prompt"), ({}, 400, "prompt"), ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"), ({"prompt": "x", "temperature": -1}, 400, "temperature"),
    ({"prompt": "x", "top_p": 2}, 400, "top_p"), ({"prompt": "x", "n": 0}, 400, "n"),
    ({"prompt": "x", "stop": [1]}, 400, "stop[0]"), ({"prompt": "x", "stream": "yes"}, 400, "stream"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"), ({"prompt": "x", "seed": "x"}, 400, "seed"),
    ({"prompt": "x", "logprobs": 99}, 400, "logprobs"), ({"prompt": "x", "model": "gpt-9"}, 404, "model"),
    ({"prompt": "x", "presence_penalty": 3}, 400, "presence_penalty"), ({"prompt": [1, 1 << 40]}, 400, "prompt[1]"),
    ({"prompt": "abc" * 4000}, 400, "prompt"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "type": "string", "minLength": 3, "maxLength": 2}}}}, 400, "response_format"),
    ({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "type": "nothing"}}}}, 400, "response_format"),
    ({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}}, 400,
     "response_format"),
]
WRONG_CHATS = [
    ({"messages": []}, 400, "messages"), ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "tools[0]"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, 400, "top_logprobs"),
]


def hostile(checks):
    """Requests that make no sense, and clients that are slow or do not read: an error or an end, and nobody else suffers."""
    options = checks.options
    with tempfile.TemporaryDirectory() as folder:
        path = model(options, folder, SMALL)
        with Server(options.binary, path, "-c", 8192, "--parallel", 16) as server:
            usual = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            right = server.post("/v1/completions", usual)[2]["choices"][0]["text"]
            others, is_over = [], threading.Event()

            def goes_on():
                while not is_over.is_set():
                    begun = time.monotonic()
                    status, _, answer = server.post("/v1/completions", usual, 60)
                    others.append((time.monotonic() - begun, status == 200 and answer["choices"][0]["text"] == right))
                    time.sleep(0.05)

            other = threading.Thread(target=goes_on)
            other.start()
            refusals(checks, server)
            large(checks, server)
            slow_and_deaf(checks, server, options.plant)
            is_over.set()
            other.join()
            slowest, well = max(time for time, _ in others), all(good for _, good in others)
            checks.check(f"meanwhile {len(others)} usual requests had their answers, the slowest after {slowest:.2f} s",
                         well and slowest < 2)
            checks.check("nothing is left under way", server.status()["running"] == 0)


def refusals(checks, server):
    wrong = []
    for path, cases in (("/v1/completions", WRONG), ("/v1/chat/completions", WRONG_CHATS)):
        for body, status, field in cases:
            got, _, answer = server.post(path, body)
            error = answer.get("error") or {}
            named = str(error.get("param") or "")
            whole = {"message", "type", "param", "code"} <= set(error)
            if got != status or not named.startswith(field) or not whole:
                wrong.append((str(body)[:100], got, error))
    checks.check(f"{len(WRONG) + len(WRONG_CHATS)} requests that make no sense: errors that name the field", not wrong)
    for one in wrong:
        print("    ", one)
    bad = (b'{"prompt": "\xff\xfe"}', b"{", b"[1]", b"", b"\0" * 100, b'{"prompt": "\\ud800"}', b"[" * 100_000)
    codes = [server.post("/v1/completions", one)[0] for one in bad]
    checks.check(f"bodies that are no JSON or no UTF-8: {codes}", all(code == 400 for code in codes))


def large(checks, server):
    connection = server.connect()
    connection.request("POST", "/v1/completions", b"x" * (100 << 20), {"content-type": "application/json"})
    answer = connection.getresponse()
    body = json.loads(answer.read())
    checks.check(f"a body of 100 MiB: {answer.status}, {body['error']['message']}", answer.status == 413)
    private = server.memory()[0]
    checks.check(f"it is not kept: {private >> 20} MiB of memory", private < 256 << 20)


def slow_and_deaf(checks, server, reads):
    """A header every ten seconds, and clients that never read an answer longer than what is kept for them."""
    deaf, readers = [], []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((server.host, server.port))
        body = json.dumps({"prompt": "x", "ignore_eos": True, "stream": True, "logprobs": 20}).encode()
        connection.sendall(head("/v1/completions", len(body)) + body)
        deaf.append(connection)
        if reads:
            readers.append(threading.Thread(target=lambda connection=connection: [None for _ in iter(lambda: connection.recv(1 << 16), b"")]))
            readers[-1].start()
    closed = closed_after(server)
    checks.check(f"a header every 10 s: closed after {closed or 0:.0f} s", closed is not None and closed < 45)
    # Unread where what is kept for a client is full, cancelled where its connection was given up before.
    ended = lambda outcome: server.metric(rf'spanker_requests_total\{{outcome="{outcome}"\}}')
    gone = lambda: ended("unread") + ended("cancelled")
    try:
        server.wait_until("nobody is deaf", lambda: gone() == len(deaf), 120)
    except RuntimeError:
        # The next line says how many.
        pass
    unread = gone()
    checks.check(f"of {len(deaf)} long answers that nobody reads {unread:.0f} are given up", unread == len(deaf))
    server.wait_until("their connections have ended", lambda: server.metric("spanker_connections") <= 3, 120)
    checks.check("and their connections are closed", True)
    for connection in deaf:
        connection.close()


def closed_after(server):
    """Seconds until a connection is closed over which a header comes every ten."""
    slow, begun = server.socket(5), time.monotonic()
    slow.sendall(b"GET /health HTTP/1.1\r\n")
    slow.settimeout(10)
    while time.monotonic() - begun < 60:
        try:
            if not slow.recv(4096):
                return time.monotonic() - begun
        except TimeoutError:
            slow.sendall(b"x-more: 1\r\n")
        except ConnectionError:
            return time.monotonic() - begun
    return None


def overload(checks):
    """Ten times what it can do: refusals with a time to wait, flat memory, and full speed again at once."""
    options = checks.options
    with tempfile.TemporaryDirectory() as folder:
        path = model(options, folder, SLOW)
        parallel, queue = 4, 1
        with Server(options.binary, path, "-c", 512, "--parallel", parallel, "--max-queue", 64 if options.plant else queue) as server:
            body = {"prompt": "abcdefgh", "max_tokens": 24, "ignore_eos": True, "cache_prompt": False}
            alone, _ = closed_loop(server, body, 1, 4)
            unloaded, rate = closed_loop(server, body, parallel, 6)
            before = server.memory()
            accepted, refused, waits, asked = open_loop(server, body, 10 * rate, options.seconds)
            peak = server.memory()
            time.sleep(2)
            again, rate_again = closed_loop(server, body, parallel, 3)
        calm, loaded = part(unloaded, 0.99), part(accepted, 0.99)
        checks.check(f"{asked / options.seconds:.0f} requests/s for {options.seconds} s where {rate:.1f} can be answered: "
                     f"{len(accepted)} answered, {len(refused)} refused, no other end",
                     asked == len(accepted) + len(refused) and refused and asked >= 8 * rate * options.seconds)
        checks.check(f"refusals are 429 with Retry-After ({min(waits, default=0)} to {max(waits, default=0)} s)",
                     len(waits) == len(refused) and min(waits, default=0) >= 1)
        checks.check(f"p99 of the accepted {loaded * 1e3:.0f} ms, {loaded / calm:.2f} times that of {parallel} clients "
                     f"({calm * 1e3:.0f} ms; one client alone {part(alone, 0.99) * 1e3:.0f} ms)", loaded <= 2 * calm)
        checks.check(f"memory {before[0] >> 10} -> {peak[0] >> 10} KiB, threads {before[1]} -> {peak[1]}, files {before[2]} -> "
                     f"{peak[2]}", peak[0] - before[0] <= MEMORY_GROWTH and peak[1] <= before[1] + 6)
        checks.check(f"2 to 5 s later {rate_again:.1f} requests/s, {100 * rate_again / rate:.0f} % of before",
                     rate_again >= 0.9 * rate and part(again, 0.5) <= 1.2 * part(unloaded, 0.5))


def closed_loop(server, body, clients, seconds):
    """Clients that ask again when they have their answer: times of answers, and answers in a second."""
    end, times = time.monotonic() + seconds, []

    def lane(_):
        while time.monotonic() < end:
            begun = time.monotonic()
            status = server.post("/v1/completions", body)[0]
            times.append(time.monotonic() - begun)
            assert status == 200, status

    begun = time.monotonic()
    for result in together(clients, lane, range(clients)):
        if isinstance(result, Exception):
            raise result
    return times, len(times) / (time.monotonic() - begun)


def open_loop(server, body, rate, seconds):
    """Requests by the clock: times of those that were answered, those refused, what refusals say, and how many there were."""
    accepted, refused, waits = [], [], []
    begun, count = time.monotonic(), int(rate * seconds)

    def ask(number):
        time.sleep(max(0, begun + number / rate - time.monotonic()))
        asked = time.monotonic()
        status, headers, _ = server.post("/v1/completions", body)
        if status == 200:
            accepted.append(time.monotonic() - asked)
        elif status == 429:
            refused.append(number)
            if headers.get("retry-after"):
                waits.append(int(headers["retry-after"]))

    together(48, ask, range(count))
    return accepted, refused, waits, count


def edge(checks):
    """Who is let in, and how it ends: keys, addresses, TLS, other sites, SIGTERM."""
    options = checks.options
    with tempfile.TemporaryDirectory() as folder:
        path = model(options, folder, SLOW)
        quick = {"prompt": "x", "max_tokens": 2}
        refused = subprocess.run([options.binary, "serve", "-m", path, "--host", "0.0.0.0", "--port", "0"],
                                 capture_output=True, text=True, timeout=60)
        checks.check(f"--host 0.0.0.0 without a key: exit code {refused.returncode}", refused.returncode == 2)

        with Server(options.binary, path, *(() if options.plant else ("--api-key", "secret"))) as server:
            codes = [keyed(server, key) for key in (None, "wrong", "secre", "secret")]
            public = server.get("/health")[0]
            checks.check(f"no key, a wrong one, a part of it, the key: {codes}; /health {public}",
                         codes == [401, 401, 401, 200] and public == 200)

        with Server(options.binary, path) as server:
            site = {"origin": "https://elsewhere.example", "content-type": "application/json"}
            status, headers = raw(server, "POST", "/v1/completions", site, json.dumps(quick))
            checks.check(f"a page of another site: {status}, and no leave to read",
                         status == 403 and "access-control-allow-origin" not in headers)
        with Server(options.binary, path, "--cors", "https://elsewhere.example") as server:
            status, headers = raw(server, "POST", "/v1/completions", site, json.dumps(quick))
            checks.check(f"with --cors it may: {status}",
                         status == 200 and headers.get("access-control-allow-origin") == site["origin"])
        drains(checks, path)
        secure(checks, folder, path, quick)


def keyed(server, key):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return raw(server, "GET", "/v1/models", headers, None)[0]


def raw(server, method, path, headers, body):
    connection = server.connect()
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.headers.items()}


def drains(checks, path):
    with Server(checks.options.binary, path, "--timeout", "60s") as server:
        body, result = {"prompt": "x", "max_tokens": 120, "ignore_eos": True}, []
        begun = threading.Event()
        stream = threading.Thread(target=lambda: result.append(server.stream("/v1/completions", body, lambda _: begun.set())))
        stream.start()
        begun.wait(60)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until("it is ending", lambda: server.get("/health")[0] == 503)
        status, _, answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        stream.join()
        code = server.process.wait(60)
    checks.check(f"SIGTERM: a new request gets {status} ({answer['error']['message']}), the stream ends with "
                 f"'{result[0][1] if result else None}', exit code {code}",
                 status == 503 and result and result[0][1] == "length" and code == 0)


def secure(checks, folder, path, quick):
    certificate, key = os.path.join(folder, "c.pem"), os.path.join(folder, "k.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext",
            "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(made, check=True, capture_output=True)

    class Secured(Server):
        def connect(self, timeout=60):
            context = ssl.create_default_context(cafile=certificate)
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=context)

    with Secured(checks.options.binary, path, "--tls-cert", certificate, "--tls-key", key) as server:
        status = server.post("/v1/completions", quick)[0]
        try:
            with urllib.request.urlopen(f"http://{server.host}:{server.port}/health", timeout=10) as answer:
                plain = answer.status
        except (OSError, http.client.HTTPException) as error:
            plain = type(error).__name__
        checks.check(f"TLS: {status}; without it: {plain}", status == 200 and plain != 200)


PARTS = {"leaks": leaks, "hostile": hostile, "overload": overload, "edge": edge}
