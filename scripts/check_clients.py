#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`spanker serve` with the clients that people have. See scripts/check-clients.

The exit code is 1 if something does not hold. With --plant, every schema is made stricter after it was asked for, and the
exit code is 0 only if that is found.
"""
import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile

import client_schemas
from serving import Server

NAME = "smollm2-135m"
TALK = [{"role": "user", "content": "Name a city in France."}]
WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
                   "additionalProperties": False}}}
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20},
                                           "age": {"type": "integer", "minimum": 0, "maximum": 150}},
          "required": ["name", "age"], "additionalProperties": False}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}


class Checks:
    """What was checked, and what does not hold."""

    def __init__(self):
        self.failed = []

    def check(self, what, holds):
        print(f"{'ok' if holds else 'FAIL':4} {what}", flush=True)
        if not holds:
            self.failed.append(what)

    def attempt(self, what, work):
        """What a client does: it must not raise, and says whether all is well."""
        try:
            self.check(what, work())
        except Exception as error:  # pylint: disable=broad-except # a client's errors are of any kind
            self.check(f"{what}: {type(error).__name__}: {str(error)[:500]}", False)


def is_person(text):
    person = json.loads(text)
    return set(person) == {"name", "age"} and 0 <= person["age"] <= 150


def with_openai(checks, server):
    import openai

    url = f"http://{server.host}:{server.port}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    usual = {"model": NAME, "messages": TALK, "max_tokens": 24, "temperature": 0.7, "seed": 5}

    def chat(**more):
        return client.chat.completions.create(**{**usual, **more})

    def streamed():
        text, usage = "", None
        for chunk in chat(stream=True, stream_options={"include_usage": True}):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        return text == chat().choices[0].message.content and usage.completion_tokens > 0

    def tools():
        call = chat(tools=[WEATHER], tool_choice="required", max_tokens=80).choices[0]
        name = call.message.tool_calls[0].function.name
        arguments = json.loads(call.message.tool_calls[0].function.arguments)
        talk = [*TALK, call.message, {"role": "tool", "tool_call_id": call.message.tool_calls[0].id, "content": "sunny"}]
        after = chat(messages=talk, tools=[WEATHER], tool_choice="none")
        return call.finish_reason == "tool_calls" and name == "weather" and set(arguments) == {"city"} and after.choices[0].message.content

    def tools_streamed():
        arguments = ""
        for chunk in chat(tools=[WEATHER], tool_choice="required", max_tokens=80, stream=True):
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or []:
                    arguments += call.function.arguments or ""
        return set(json.loads(arguments)) == {"city"}

    def chances():
        content = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        return content and all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)

    def stops():
        whole = chat(temperature=0).choices[0].message.content
        word = whole.split()[2]
        cut = chat(temperature=0, stop=[word]).choices[0]
        return word not in cut.message.content and whole.startswith(cut.message.content) and cut.finish_reason == "stop"

    def objects():
        # A model of this size does not always come to an end.
        asked = [chat(response_format={"type": "json_object"}, max_tokens=300, seed=seed).choices[0] for seed in range(4)]
        whole = [json.loads(choice.message.content) for choice in asked if choice.finish_reason == "stop"]
        return whole and all(isinstance(one, dict) for one in whole)

    def raises(kind, field, **more):
        try:
            chat(**more)
        except kind as error:
            return error.param == field and error.type
        return False

    async def many():
        others = openai.AsyncOpenAI(base_url=url, api_key="none")
        asked = [others.chat.completions.create(**{**usual, "seed": seed % 4}) for seed in range(16)]
        texts = [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]
        return texts == texts[:4] * 4 and len(set(texts)) > 1

    def parsed():
        from pydantic import BaseModel

        class Person(BaseModel):
            name: str
            age: int

        answer = client.beta.chat.completions.parse(**{**usual, "max_tokens": 300}, response_format=Person)
        return isinstance(answer.choices[0].message.parsed, Person)

    for what, work in [
        ("chat", lambda: chat().choices[0].message.content), ("stream, with usage", streamed), ("tools", tools),
        ("tools, streamed", tools_streamed), ("logprobs", chances), ("stop", stops),
        ("JSON schema", lambda: is_person(chat(response_format=AS_PERSON, max_tokens=200).choices[0].message.content)),
        ("a class as the answer's form", parsed),
        ("JSON object", objects),
        ("n", lambda: len({choice.message.content for choice in chat(n=3).choices}) == 3),
        ("seed", lambda: chat().choices[0].message.content == chat().choices[0].message.content
         != chat(seed=6).choices[0].message.content),
        ("16 at once, by the asynchronous client", lambda: asyncio.run(many())),
        ("completions", lambda: client.completions.create(model=NAME, prompt=["a", "b"], max_tokens=4).choices[1].text),
        ("models", lambda: [model.id for model in client.models.list()] == [NAME]),
        ("BadRequestError names the field", lambda: raises(openai.BadRequestError, "temperature", temperature=-1)),
        ("NotFoundError for another model", lambda: raises(openai.NotFoundError, "model", model="gpt-9")),
    ]:
        checks.attempt(f"openai {openai.__version__}: {what}", work)


def with_litellm(checks, server):
    import importlib.metadata

    # It has a list of prices with it, and need not look for another one.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.telemetry, litellm.suppress_debug_info = False, True
    usual = {"model": f"openai/{NAME}", "api_base": f"http://{server.host}:{server.port}/v1", "api_key": "none",
             "messages": TALK, "max_tokens": 24, "temperature": 0.7, "seed": 5}

    def chat(**more):
        return litellm.completion(**{**usual, **more})

    def content(**more):
        return chat(**more).choices[0].message.content

    def streamed():
        return "".join(chunk.choices[0].delta.content or "" for chunk in chat(stream=True)) == content()

    def tools():
        call = chat(tools=[WEATHER], tool_choice="required", max_tokens=80).choices[0].message.tool_calls[0]
        return call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"city"}

    def stops():
        word = content(temperature=0).split()[2]
        return word not in content(temperature=0, stop=[word])

    version = importlib.metadata.version("litellm")
    for what, work in [
        ("chat", content), ("stream", streamed), ("tools", tools), ("stop", stops),
        ("JSON schema", lambda: is_person(content(response_format=AS_PERSON, max_tokens=200))),
        ("logprobs", lambda: chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content[0].logprob <= 0),
        ("n", lambda: len(chat(n=2).choices) == 2), ("seed", lambda: content() == content()),
    ]:
        checks.attempt(f"litellm {version}: {what}", work)


def with_llm(checks, server, folder):
    import importlib.metadata

    base = f"http://{server.host}:{server.port}/v1"
    with open(os.path.join(folder, "extra-openai-models.yaml"), "w", encoding="utf-8") as file:
        file.write(f"- model_id: here\n  model_name: {NAME}\n  api_base: {base}\n  supports_schema: true\n"
                   "  supports_tools: true\n")

    def llm(*arguments):
        command = ["llm", "prompt", "-m", "here", *arguments]
        environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise RuntimeError(done.stderr[-400:])
        return done.stdout

    few = ("-o", "max_tokens", "24", "-o", "seed", "5")
    # The model is small: whether it calls a tool is its own affair, that the request is understood is not.
    tool = ("--functions", "def weather(city: str) -> str:\n    'The weather of a city.'\n    return 'sunny'")
    for what, work in [
        ("stream", lambda: llm("Name a city.", *few).strip()), ("chat", lambda: llm("Name a city.", "--no-stream", *few).strip()),
        ("seed", lambda: llm("Name a city.", *few) == llm("Name a city.", *few)),
        ("JSON schema", lambda: is_person(llm("A person.", "--schema", json.dumps(PERSON), "-o", "max_tokens", "200"))),
        ("tools", lambda: llm("What is the weather in Paris?", *tool, *few) is not None),
        ("logit bias", lambda: llm("Name a city.", *few, "-o", "logit_bias", '{"100": -100}').strip()),
    ]:
        checks.attempt(f"llm {importlib.metadata.version('llm')}: {what}", work)


def with_schemathesis(checks, server, examples, folder):
    kinds = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = ["schemathesis", "run", f"http://{server.host}:{server.port}/openapi.json", "--checks", kinds,
               "--max-examples", str(examples), "--seed", "1", "--request-timeout", "60", "--no-color",
               "--phases", "examples,coverage,fuzzing"]
    # It leaves notes where it runs.
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, cwd=folder)
    text = done.stdout
    found = [line.strip() for line in text.splitlines() if "generated" in line or "passed" in line]
    checks.check(f"schemathesis, {examples} examples of each operation: {'; '.join(found[-2:])}", done.returncode == 0)
    if done.returncode:
        print(text[-6000:], done.stderr[-2000:])
    checks.check("the server is well after that", server.get("/health")[0] == 200)


PARTS = ("openai", "litellm", "llm", "schemathesis", "schemas")


def main():
    parser = argparse.ArgumentParser(prog="check-clients")
    parser.add_argument("binary")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} [default: all]")
    parser.add_argument("--suite", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--examples", type=int, default=100, help="examples of each operation that schemathesis tries")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", action="store_true", help="plant a fault in the schemas: it must be found")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]}")
    subprocess.run([options.binary, "fetch", NAME], check=True, stdout=subprocess.DEVNULL)
    # Nothing that a client keeps is somebody's own.
    with tempfile.TemporaryDirectory() as folder:
        parts, checks = options.parts or PARTS, Checks()
        with Server(options.binary, NAME, "-c", "2048", "--timeout", "1s") as server:
            if "openai" in parts:
                with_openai(checks, server)
            if "litellm" in parts:
                with_litellm(checks, server)
            if "llm" in parts:
                with_llm(checks, server, folder)
            if "schemas" in parts:
                client_schemas.check(checks, server, options)
        if "schemathesis" in parts:
            path = os.path.join(folder, "small.gguf")
            shape = "--layers 2 --hidden 64 --heads 2 --kv-heads 2 --ffn 96 --vocab 300 --context 512 --quant q8_0"
            subprocess.run([options.binary, "synth", "llama", *shape.split(), "--out", path], check=True, stdout=subprocess.DEVNULL)
            with Server(options.binary, path, "--timeout", "1s") as server:
                with_schemathesis(checks, server, options.examples, folder)
    if options.plant:
        sys.exit(0 if checks.failed else "check-clients: what was planted was not found")
    if checks.failed:
        sys.exit(f"check-clients: {len(checks.failed)} do not hold: " + "; ".join(checks.failed))


if __name__ == "__main__":
    main()
