"""Bodies that no honest client sends: known ones, and the protocol table's, mutated."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.protocol.table import BASE, CHAT, GENERATE, TEXT, cases

JSON_TYPE = "application/json"


@dataclass(frozen=True)
class Hostile:
    """One request. name: what is wrong with it."""

    name: str
    path: str
    body: bytes
    content_type: str = JSON_TYPE
    method: str = "POST"


def nested(depth: int, around: Any = 1) -> Any:
    for _ in range(depth):
        around = [around]
    return around


def nested_text(depth: int) -> str:
    """A schema as JSON: Python's own encoder does not go as deep wherever it is called."""
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def doubling(levels: int) -> dict[str, Any]:
    """A schema whose references double at each level."""

    def either(level: int) -> Any:
        one = {"$ref": f"#/$defs/d{level + 1}"}
        return {"anyOf": [one, {"type": "array", "items": one}]}

    defs = {f"d{level}": either(level) for level in range(levels)}
    return {"$defs": {**defs, f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


# structured_outputs that do not compile, or hardly.
GRAMMARS: dict[str, dict[str, Any]] = {
    "(a{1000}){1000}": {"regex": "(a{1000}){1000}"},
    "left recursion": {"grammar": 'start: start "a" | start "b"'},
    "left recursion with an end": {"grammar": 'start: start "a" | "b"'},
    "recursion through nothing": {"grammar": 'start: a\na: a a | "b" |'},
    "ambiguous": {"grammar": 'start: e\ne: e e | e e e | "a" | ""'},
    "$ref to itself": {"json": {"$ref": "#"}},
    "$ref outside": {"json": {"$ref": "http://127.0.0.1:1/schema"}},
    "960 nested arrays as text": {"json": nested_text(960)},
    "240 nested arrays": {"json": nested_text(240)},
    "choices of 100,000": {"choice": [letter * 100_000 for letter in "abcdefgh"]},
    "choices of 8,000": {"choice": [letter * 8_000 for letter in "abcdefgh"]},
    "9,000 choices": {"choice": [str(number) for number in range(9_000)]},
    "a{60000}": {"regex": "a{60000}"},
    "many stars": {"regex": "(.*a){200}b"},
    "optional in optional": {"regex": "(((a?){30}){30}){30}"},
    "look-around": {"regex": "(?=a)(?<!b)a"},
    "back-reference": {"regex": r"(a)\1"},
    "no regex": {"regex": "([a-"},
    "letters of all alphabets": {"regex": r"(\p{L}{1,100}\s?){1,100}"},
    "300 patterns at once": {
        "json": {"allOf": [{"type": "string", "pattern": f"a{{{n}}}b*"} for n in range(300)]}
    },
    "1,500 properties": {
        "json": {"type": "object", "properties": {f"p{n}": {} for n in range(1500)}}
    },
    "references that double": {"json": doubling(24)},
    "long strings": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}},
    "many items": {"json": {"type": "array", "minItems": 10**6, "items": {"pattern": "(a|b){99}"}}},
    "no value": {"json": {"not": {}}},
    "an infinite number": {"json": {"multipleOf": 1e-300, "type": "number", "minimum": 1e300}},
    "empty": {},
    "two at once": {"regex": "a", "choice": ["a"]},
}


def known() -> Iterator[Hostile]:
    """Each of the examples, small ones first."""
    text = {"model": "tiny", "prompt": "x", "max_tokens": 4}
    for name, form in GRAMMARS.items():
        yield Hostile(name, TEXT, _dump(text | {"structured_outputs": form}))
    schema = {"name": "x", "schema": {"$ref": "#"}}
    chat = {**BASE[CHAT], "response_format": {"type": "json_schema", "json_schema": schema}}
    yield Hostile("$ref in a chat", CHAT, _dump(chat))
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": json.loads(nested_text(120))},
    }
    tools = {"tools": [tool], "tool_choice": "required"}
    yield Hostile("tools of nested arrays", CHAT, _dump(BASE[CHAT] | tools))
    for name, fields in LARGE_FIELDS.items():
        yield Hostile(name, TEXT, _dump(text | fields))
    for name, fields in LARGE_LISTS.items():
        yield Hostile(name, GENERATE, _dump(fields))
    for name, body in raw_bodies().items():
        yield Hostile(name, TEXT, body)
    messages = [{"role": "user", "content": "a"}] * 4096
    yield Hostile("4,096 messages", CHAT, _dump({"model": "tiny", "messages": messages}))
    for path in ("/tokenize", "/detokenize", "/v1/embeddings", "/abort_request", "/flush_cache"):
        yield Hostile(f"an odd body at {path}", path, _dump({"prompt": nested(300), "tokens": {}}))
    yield Hostile("900,000 tokens", "/detokenize", _dump({"tokens": [5] * 900_000}))
    for kind in (
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
    ):
        yield Hostile(f"a body of {kind}", TEXT, _dump(text), kind)
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"):
        yield Hostile(f"{method}", TEXT, b"", method=method)


LARGE_FIELDS: dict[str, dict[str, Any]] = {
    "128 choices without end": {"n": 128, "max_tokens": 3000, "ignore_eos": True},
    "128 prompts with logprobs": {"prompt": ["x"] * 128, "logprobs": 20, "echo": True},
    "64 choices with logprobs": {"n": 64, "max_tokens": 500, "ignore_eos": True, "logprobs": 20},
    "128 long prompts": {"prompt": [[n % 7 + 3] * 2000 for n in range(128)]},
    "prompt logprobs": {"prompt": [[5] * 2000] * 32, "prompt_logprobs": 20},
    "16 long stop strings": {"stop": ["a" * 1000 + str(n) for n in range(16)], "max_tokens": 500},
    "a prompt of 8 MB": {"prompt": "a" * 8_000_000},
    "a prompt of 900,000 ids": {"prompt": [1] * 900_000},
    "ids beyond the vocabulary": {"prompt": [2**31, 2**63, -1]},
    "2,000 biases": {"logit_bias": {str(n): 1 for n in range(2000)}},
    "a long key": {"a" * 1_000_000: 1},
    "10,000 unknown fields": {f"field{n}": n for n in range(10_000)},
    "metadata of 8 MB": {"metadata": {"a": "b" * 7_900_000}},
}
LARGE_LISTS: dict[str, dict[str, Any]] = {
    "128 grammars": {
        "text": ["x"] * 128,
        "sampling_params": [{"regex": f"(a{{{n}}}){{{n}}}"} for n in range(400, 528)],
    },
    "a million parameters": {"text": ["x"] * 128, "sampling_params": [{}] * 1_000_000},
    "a million names": {"text": ["x"] * 128, "rid": ["a"] * 1_000_000},
    "half a surrogate as a name": {"text": ["x", "y"], "rid": ["a", "\ud800"]},
    "no text and a list of parameters": {"text": "", "sampling_params": []},
    "lists in lists": {"text": ["x"], "sampling_params": [[[{}]]], "return_logprob": [[True]]},
}


def raw_bodies() -> dict[str, bytes]:
    """Made when they are asked for: one has 200 MB."""
    return {
        "200 MB": b'{"model":"tiny","prompt":"' + b"a" * 200_000_000 + b'"}',
        "960 nested arrays": (
            '{"model":"tiny","prompt":"x","structured_outputs":{"json":' + nested_text(960) + "}}"
        ).encode(),
        "nested brackets": b'{"model":"tiny","prompt":' + b"[" * 4_000_000,
        "50,000 brackets": b"[" * 50_000 + b"]" * 50_000,
        "4,000,000 numbers": b'{"model":"tiny","prompt":[' + b"1," * 4_000_000 + b"1]}",
        "a number of 5,000 digits": b'{"model":"tiny","prompt":"x","seed":' + b"9" * 5000 + b"}",
        "a number beyond floats": b'{"model":"tiny","prompt":"x","temperature":1e999}',
        "no number": b'{"model":"tiny","prompt":"x","temperature":NaN}',
        "half a surrogate": rb'{"model":"tiny","prompt":"\ud800"}',
        "bad UTF-8": b'{"model":"tiny","prompt":"\xff\xfe"}',
        "UTF-16": '{"model":"tiny","prompt":"x"}'.encode("utf-16"),
        "nothing": b"",
        "a field twice": b'{"model":"tiny","model":7,"prompt":"x"}',
        "NUL": b'{"model":"tiny","prompt":"\\u0000"}\x00',
    }


# What takes the place of a value.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30),
    *(0.5, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan),
    *("", "x", "\x00", "\ud800", "😀" * 50, "a" * 5000, "../../etc/passwd", "{{ 7*7 }}"),
    *("<|im_start|>", "<|im_end|>", "${jndi:ldap://x}", "'; DROP TABLE x", "%s%n%x"),
    *([], {}, [[]], [{}], {"": ""}, {"a": None}, [None], nested(20), nested(150)),
    *(["x"] * 200, list(range(300)), {str(n): n for n in range(200)}, [1, "a", None, {}]),
)


class Mutations:
    """Bodies of the protocol table, each with one or more things wrong."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._cases = list(cases())

    def next(self) -> Hostile:
        case = self._random.choice(self._cases)
        if self._random.random() < 0.3:
            body = self._spoil(_dump(case.body))
            return Hostile(f"spoiled bytes of {case.name}", case.path, body)
        body = copy.deepcopy(case.body)
        names = [self._change(body) for _ in range(self._random.choice((1, 1, 2, 4)))]
        return Hostile(f"{', '.join(names)} in {case.name}", case.path, _dump(body))

    def _change(self, body: dict[str, Any]) -> str:
        """Change one place of it; says what."""
        places = list(_places(body))
        if not places:
            return "nothing left"
        holder, key = self._random.choice(places)
        if self._random.random() < 0.4:
            holder[key] = self._nudged(holder[key])
            return f"another {key}"
        kind = self._random.randrange(6)
        if kind == 0:
            del holder[key]
            return f"no {key}"
        if kind == 1 and isinstance(holder, dict):
            name = self._random.choice(("extra", "__proto__", "constructor", key + " ", ""))
            holder[name] = holder[key]
            return f"a field {name!r}"
        if kind == 2:
            holder[key] = [copy.deepcopy(holder[key])] * self._random.choice((1, 2, 200))
            return f"{key} in a list"
        if kind == 3:
            other = self._random.choice(self._cases).body
            holder[key] = copy.deepcopy(self._random.choice(list(other.values())))
            return f"another field's {key}"
        holder[key] = copy.deepcopy(self._random.choice(ODD))
        return f"an odd {key}"

    def _nudged(self, value: Any) -> Any:
        """A value of the same type, which may well be taken."""
        choose = self._random.choice
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return choose((0, 1, 2, value + 1, value * 7, -value, 127, 2000))
        if isinstance(value, float):
            return choose((0.0, 1e-9, value * 3, 1.0, 2.0, -value))
        if isinstance(value, str):
            return choose((value * 20, value[: len(value) // 2], value[::-1], "żółw 😀" * 30, "\n"))
        if isinstance(value, list):
            return choose((value * 3, value[:1], value[::-1]))
        return value

    def _spoil(self, body: bytes) -> bytes:
        spoiled = bytearray(body)
        for _ in range(self._random.choice((1, 1, 3, 20))):
            at = self._random.randrange(len(spoiled) + 1)
            kind = self._random.randrange(4)
            if kind == 0:
                spoiled[at : at + self._random.randrange(1, 30)] = b""
            elif kind == 1:
                spoiled[at:at] = self._random.randbytes(self._random.randrange(1, 10))
            elif kind == 2:
                spoiled[at:at] = self._random.choice((b"[", b"}", b'"', b"\\", b",,", b"\xff"))
            else:
                spoiled[at : at + 1] = bytes([self._random.randrange(256)])
        return bytes(spoiled)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, key) of all that it holds."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in list(items):
        yield value, key
        if isinstance(one, dict | list):
            yield from _places(one)


def _dump(body: Any) -> bytes:
    return json.dumps(body).encode("utf-8", "surrogatepass")
