# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of a public test suite and random ones: every complete answer must be valid. Part of check_clients.py."""
import collections
import json
import os
import random
import re

from serving import together

DRAFTS = {"draft4": "http://json-schema.org/draft-04/schema#", "draft6": "http://json-schema.org/draft-06/schema#",
          "draft7": "http://json-schema.org/draft-07/schema#",
          "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
          "draft2020-12": "https://json-schema.org/draft/2020-12/schema"}
CLIENTS = 16
# A model of this size may not come to an end of its own accord: it is asked again, with other seeds.
ATTEMPTS = 3


def of_suite(folder):
    """The schemas of the suite, without those that refer to others by their address."""
    found = {}
    for draft, name in DRAFTS.items():
        for base, _, files in sorted(os.walk(os.path.join(folder, draft))):
            for file in sorted(files):
                if not file.endswith(".json") or file in ("refRemote.json", "vocabulary.json"):
                    continue
                with open(os.path.join(base, file), encoding="utf-8") as opened:
                    for group in json.load(opened):
                        schema = group["schema"]
                        if isinstance(schema, dict):
                            schema = {"$schema": name, **schema}
                            found[json.dumps(schema)] = schema
    return list(found.values())


def number(chance):
    low = chance.randrange(-50, 50)
    schema = {"type": chance.choice(("integer", "number")), "minimum": low, "maximum": low + chance.randrange(1, 100)}
    if schema["type"] == "integer" and chance.random() < 0.3:
        schema["multipleOf"] = chance.choice((2, 3, 5))
        schema["maximum"] = low + 100
    return schema


def text(chance):
    return chance.choice((
        {"type": "string", "maxLength": chance.randrange(1, 12)},
        {"type": "string", "minLength": 2, "maxLength": chance.randrange(2, 12)},
        {"type": "string", "pattern": chance.choice(("^[a-z]{2,5}$", "^[0-9]{3}-[A-Z]+$", "^(yes|no)$", "^\\d+(\\.\\d+)?$")),
         },
        {"type": "string", "format": chance.choice(("date", "time", "date-time", "uuid", "ipv4", "email"))},
    ))


def generated(chance, depth=0):
    """A schema with an end: texts are short, lists have few items."""
    simple = [number, text, lambda _: {"type": "boolean"}, lambda _: {"type": "null"},
              lambda chance: {"enum": chance.sample(["a", "b c", 1, 2.5, None, True, "\u00e9\u4e2d", "\"", "\\"], 3)},
              lambda chance: {"const": chance.choice(["x", 7, None, {"k": [1]}, [], ""])}]
    if depth > 2 or chance.random() < 0.4 and depth:
        return chance.choice(simple)(chance)
    kind = chance.randrange(5)
    if kind == 0:
        least = chance.randrange(0, 3)
        return {"type": "array", "items": generated(chance, depth + 1), "minItems": least, "maxItems": least + 2}
    if kind == 1:
        return {"anyOf": [generated(chance, depth + 1) for _ in range(chance.randrange(1, 4))]}
    if kind == 2:
        return {"type": "array", "prefixItems": [generated(chance, depth + 1) for _ in range(2)], "items": False,
                "minItems": 2}
    names = chance.sample(["name", "a b", "x-y", "\u00fcber", "$id2", "list", "0", ""], chance.randrange(1, 5))
    schema = {"type": "object", "properties": {name: generated(chance, depth + 1) for name in names},
              "required": chance.sample(names, chance.randrange(len(names) + 1)), "additionalProperties": False}
    if kind == 3 and depth == 0:
        schema["$defs"] = {"node": generated(chance, 2)}
        schema["properties"]["ref"] = {"$ref": "#/$defs/node"}
    return schema


def validator(schema):
    import jsonschema

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def ask(server, number, schema):
    """What becomes of a schema: a word, and the answer or the error."""
    for attempt in range(ATTEMPTS):
        request = {
            "messages": [{"role": "user", "content": f"Give me JSON, number {number}."}], "max_tokens": 300,
            "temperature": 0.8, "seed": 100 * number + attempt,
            "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
        }
        status, _, answer = server.post("/v1/chat/completions", request)
        if status == 400 and str(answer["error"]["param"]).startswith("response_format"):
            return "refused", answer["error"]["message"]
        if status != 200:
            return f"status {status}", answer
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            return "complete", choice["message"]["content"]
    return "cut", choice["message"]["content"]


def judge(schema, came):
    """An answer that is complete is valid or not."""
    what, answer = came
    if what != "complete":
        return what, answer
    try:
        errors = [error.message for error in validator(schema).iter_errors(json.loads(answer))]
    except re.error:
        # Python's expressions lack classes by name.
        return "not judged", answer
    except Exception as error:  # pylint: disable=broad-except # a validator's errors are of any kind
        errors = [f"{type(error).__name__}: {error}"]
    return ("invalid", f"{answer}: {errors[0]}") if errors else ("valid", answer)


def check(checks, server, options):
    """As many schemas as were asked for, half of them of the suite; those that are refused count for nothing."""
    chance = random.Random(options.seed)
    suite = of_suite(options.suite)
    chance.shuffle(suite)
    half = options.schemas // 2
    for name, source in (("public test suite", iter(suite)), ("generated", iter(lambda: generated(chance), None))):
        counts, shown, wanted = collections.Counter(), [], half
        while counts["valid"] + counts["invalid"] < wanted:
            left = wanted - counts["valid"] - counts["invalid"]
            schemas = [schema for schema, _ in zip(source, range(left))]
            if not schemas:
                break
            came = together(CLIENTS, lambda pair: ask(server, *pair), list(enumerate(schemas, sum(counts.values()))))
            for schema, one in zip(schemas, came):
                one = ("raised", one) if isinstance(one, Exception) else one
                if options.plant and isinstance(schema, dict):
                    schema = {"allOf": [schema, {"not": {"type": ["string", "number"]}}]}
                what, detail = judge(schema, one)
                counts[what] += 1
                if what not in ("valid", "refused", "cut", "not judged"):
                    shown.append((what, json.dumps(schema), str(detail)[:300]))
        answered = counts["valid"] + counts["invalid"]
        said = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        checks.check(f"JSON schemas, {name}: {answered} complete answers ({said})", answered > 0 and not shown)
        for one in shown[:10]:
            print("    ", *one)
