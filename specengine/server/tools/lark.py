"""Grammars in llguidance's Lark dialect, written rule by rule.

A marker that is a special token of the model is written as its id, for no text spells it. Text up
to another marker is one lazy lexeme: it ends where the marker is complete for the first time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from specengine.core.grammar import WHITESPACE


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Lark:
    """The rules of one grammar. special: the markers that are special tokens, with their ids."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: dict[str, str] = {}  # bodies by name
        self._names: dict[str, str] = {}  # by body, or by the argument of `recursive`
        marks = sorted(special, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, marks))) if marks else None

    def is_token(self, marker: str) -> bool:
        return marker in self._special

    def rule(self, body: str, name: str = "rule", is_lazy: bool = False) -> str:
        """The name of a rule with this body. A name in capitals is a terminal's."""
        if body not in self._names:
            self._names[body] = self._name(name)
            self._rules[self._names[body] + ("[lazy]" if is_lazy else "")] = body
        return self._names[body]

    def recursive(self, what: str, body: Callable[[], str]) -> str:
        """The name of a rule for `what`, whose body may refer to it by asking again."""
        if what not in self._names:
            self._names[what] = self._name("rule")
            self._rules[self._names[what]] = ""  # takes the number
            self._rules[self._names[what]] = body()
        return self._names[what]

    def _name(self, name: str) -> str:
        return f"{name}_{len(self._rules)}"

    def literal(self, text: str) -> str:
        """This text."""
        parts, place = [], 0
        for match in self._split.finditer(text) if self._split else ():
            if match.start() > place:
                parts.append(quote(text[place : match.start()]))
            parts.append(f"<[{self._special[match[0]]}]>")
            place = match.end()
        if place < len(text):
            parts.append(quote(text[place:]))
        return " ".join(parts)

    def text(self, but: str = "") -> str:
        """Any text. but: none that begins with this one, after whitespace."""
        everything = self.rule("/(?s:.*)/", "ANY")
        if not but or self.is_token(but):
            return everything
        return self.rule(f"{everything} & ~(/\\s*/ {quote(but)} {everything})", "TEXT")

    def upto(self, marker: str, lead: str = "", but: str = "") -> str:
        """`lead`, then any text up to a marker, and that one. but: as in `text`."""
        if self.is_token(marker):
            return f"{self.literal(lead)} {self.text(but)}? {self.literal(marker)}"
        if self.is_token(lead):
            return f"{self.literal(lead)} {self.upto(marker)}"
        body = f"{quote(lead) if lead else ''} {self.text()} {quote(marker)}".lstrip()
        if but and not self.is_token(but):
            body = f"({body}) & ~(/\\s*/ {quote(but)} {self.text()})"
        return self.rule(self.rule(body, "UPTO"), "upto", is_lazy=True)

    def space(self) -> str:
        """Some whitespace, or none."""
        return self.rule(f"/{WHITESPACE}/", "SPACE") + "?"

    def json(self, schema: Mapping[str, Any], is_lenient: bool = False) -> str:
        """JSON that follows a schema. is_lenient: what the compiler does not know in the schema is
        left out of account."""
        guidance = {"whitespace_pattern": WHITESPACE, "lenient": is_lenient}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': guidance})}", "json")

    def write(self, start: str) -> str:
        """The whole grammar."""
        rules = "".join(f"{name}: {body}\n" for name, body in self._rules.items())
        return f"start: {start}\n{rules}"
