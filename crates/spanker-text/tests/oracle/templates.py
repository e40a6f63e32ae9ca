#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes templates.json: conversations by templates in the manner of each family (templates/NAME.jinja), as Python's
jinja2 renders them with the settings of `transformers`.

    python3 templates.py > templates.json
"""

import json
import pathlib

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).parent / "templates"


class Generation(Extension):
    """Marks what a model is trained on; it changes no text."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller):
        return caller()


class Refused(Exception):
    pass


def refuse(message):
    raise Refused(message)


def dumped(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment():
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = dumped
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda _: "26 Jul 2024"
    return made


def call(name, arguments, identity="abcdefgh1"):
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says how the <weather> is, \"today\".",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Where"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["place"],
            },
        },
    }
]
PLAIN = [{"role": "user", "content": " How <|im_end|> are you? \n"}]
SYSTEM = [{"role": "system", "content": "Be brief.\n"}, *PLAIN]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hey é{{ x }}"},
    {"role": "user", "content": "日本?"},
]
CALLS = [
    {"role": "user", "content": "Is it warm?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("weather", {"place": "Århus <x>", "days": [1, 2]})],
    },
    {"role": "tool", "content": "12 degrees", "tool_call_id": "abcdefgh1", "name": "weather"},
    {"role": "user", "content": "Thanks"},
]
CONVERSATIONS = [(PLAIN, []), (SYSTEM, []), (TURNS, []), (TURNS, TOOLS), (CALLS, TOOLS)]


def rendered(template, messages, tools, prompt):
    given = {"messages": messages, "add_generation_prompt": prompt}
    given |= {"bos_token": "<s>", "eos_token": "</s>"}
    try:
        return {"text": template.render(tools=tools or None, **given)}
    except Refused as refused:
        return {"refused": str(refused)}


def main():
    families = []
    for path in sorted(HERE.glob("*.jinja")):
        template = environment().from_string(path.read_text())
        cases = [
            {"messages": messages, "tools": tools, "prompt": prompt}
            | rendered(template, messages, tools, prompt)
            for messages, tools in CONVERSATIONS
            for prompt in (True, False)
        ]
        families.append({"family": path.stem, "cases": cases})
    lines = ",\n".join(json.dumps(family, ensure_ascii=False) for family in families)
    print(f"[\n{lines}\n]")


main()
