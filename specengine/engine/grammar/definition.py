"""Grammars in llguidance's own terms. It imports nothing heavy: trial.py does without PyTorch."""

from __future__ import annotations

import json
import re

from specengine.core.grammar import WHITESPACE, GrammarSpec

# Most characters of a reason that a client gets.
_MOST_SHOWN = 200

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def definition(spec: GrammarSpec) -> str:
    """What LLMatcher takes. Raises ValueError."""
    if spec.frame is None:
        return _body(spec)
    body = _body(spec)  # Lark, or JSON: {"grammars": [...]}
    inner = json.loads(body)["grammars"][0] if body.startswith("{") else {"lark_grammar": body}
    frame = {"name": "frame", "lark_grammar": spec.frame}
    return json.dumps({"grammars": [frame, inner | {"name": "body"}]})


def _body(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher, grammar_from

    if spec.kind in ("json_schema", "json_object"):
        schema = spec.text if spec.kind == "json_schema" else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(
            schema, defaults={"whitespace_pattern": WHITESPACE}
        )
    if spec.kind == "ebnf":
        return grammar_from("gbnf" if _GBNF_RULE.search(spec.text) else "lark", spec.text)
    if spec.kind == "regex":
        return grammar_from("regex", spec.text)
    return grammar_from("choice", spec.text)


def why_stuck(error: str) -> str:
    """A matcher's error once it has begun, without its state. Some kinds have no words of their
    own: nothing may follow, and yet the text has not ended."""
    head = shown(error)
    return head if " " in head else "no text can follow it, or it is too complex"


def shown(error: str) -> str:
    """The first line of llguidance's message: the rest shows its state or the whole grammar. Of a
    regular expression, what is wrong with it, which is on a later line."""
    lines = error.strip().split("\n")
    why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    if why is None:
        return _cut(lines[0])
    quoted = re.search(r"invalid regex (?=(.*) \(in regex\))", lines[0])
    place = f" {_cut(quoted[1], _MOST_SHOWN // 2)}" if quoted else ""
    return f"invalid regex{place}: {_cut(why, _MOST_SHOWN // 2)}"


def _cut(text: str, most: int = _MOST_SHOWN) -> str:
    return text if len(text) <= most else text[:most] + "..."
