"""A JSON schema as the grammar of Python's keyword arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specengine.core.errors import RequestError
from specengine.server.tools.format import Tool
from specengine.server.tools.lark import Lark, quote

# Words that only describe, or that the grammar follows. Others cannot be enforced here.
_FOLLOWED = {"type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf"}
_FOLLOWED |= {"$ref", "$defs", "definitions", "additionalProperties"}
_KNOWN = _FOLLOWED | {"title", "description", "default", "examples", "$schema"}
_TERMINALS = {
    "string": ("STRING", r'/"([^"\\\n]|\\["\\nrt])*"/'),
    "integer": ("INTEGER", r"/-?(0|[1-9][0-9]{0,18})/"),
    "number": ("NUMBER", r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][-+]?[0-9]{1,3})?/"),
    "boolean": ("BOOLEAN", '"True" | "False"'),
    "null": ("NONE", '"None"'),
}


class PythonGrammar:
    """The rules for one tool, added to those of `lark`."""

    def __init__(self, lark: Lark, tool: Tool) -> None:
        self._lark, self._tool = lark, tool

    def arguments(self) -> str:
        """The expression of what is between the call's brackets. Raises RequestError where the
        tool is strict and its schema has words that cannot be enforced."""
        parameters = self._tool.parameters
        self._check(parameters)
        return self._members(parameters, lambda name: f"{name}=")

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):  # true, or missing
            return self._any()
        self._check(schema)
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        if "const" in schema or "enum" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return self._either(quote(written(value)) for value in values)
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            return self._either(self._value(one) for one in options)
        types = schema.get("type")
        if types is None:
            return self._any() if "properties" not in schema else self._dictionary(schema)
        named = [types] if isinstance(types, str) else types
        return self._either(self._of_type(one, schema) for one in named)

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> str:
        if name == "array":
            item = self._value(schema.get("items"))
            return self._lark.rule(f'"[" ({item} (", " {item})*)? "]"')
        if name == "object":
            return self._dictionary(schema)
        if name not in _TERMINALS:
            raise RequestError(f"tools: {self._tool.name}: {name!r} is no type of JSON", "tools")
        return self._lark.rule(_TERMINALS[name][1], _TERMINALS[name][0])

    def _dictionary(self, schema: Mapping[str, Any]) -> str:
        if schema.get("properties"):
            members = self._members(schema, lambda name: f"{written(name)}: ")
            return self._lark.rule(f'"{{" {members} "}}"')
        other = schema.get("additionalProperties")
        if other is False:
            return quote("{}")
        item = f'{self._of_type("string", {})} ": " {self._value(other)}'
        return self._lark.rule(f'"{{" ({item} (", " {item})*)? "}}"')

    def _members(self, schema: Mapping[str, Any], lead: Callable[[str], str]) -> str:
        """Properties in the order of the schema, those that are not required or not there."""
        required = schema.get("required", ())
        first, later = '""', '""'  # what may follow: before any was written, and after
        for name, one in reversed((schema.get("properties") or {}).items()):
            written_one = f"{quote(lead(name))} {self._value(one)} {later}"
            is_required = name in required
            first = self._lark.rule(written_one + ("" if is_required else f" | {first}"))
            later = self._lark.rule(f'", " {written_one}' + ("" if is_required else f" | {later}"))
        return first

    def _any(self) -> str:
        return self._lark.recursive("any value of Python", self._any_body)

    def _any_body(self) -> str:
        plain = [self._of_type(one, {}) for one in ("string", "number", "boolean", "null")]
        several = [self._of_type(one, {}) for one in ("array", "object")]
        return " | ".join(plain + several)

    def _reference(self, path: str) -> str:
        target: Any = self._tool.parameters
        for step in path.split("/")[1:]:
            target = target.get(step) if isinstance(target, Mapping) else None
        if not path.startswith("#") or target is None:
            message = f"tools: {self._tool.name}: {path!r} leads to no part of its schema"
            raise RequestError(message, "tools")
        return self._lark.recursive(f"{self._tool.name} {path}", lambda: self._value(target))

    def _either(self, options: Iterable[str]) -> str:
        return f"({' | '.join(options)})"

    def _check(self, schema: Mapping[str, Any]) -> None:
        unknown = sorted(set(schema) - _KNOWN)
        if self._tool.is_strict and unknown:
            raise RequestError(
                f"tools: {self._tool.name} is strict, but {unknown[0]} cannot be enforced in this "
                "model's format; leave it out of the schema, or strict out of the tool",
                "tools",
            )


def written(value: Any) -> str:
    """A value of JSON as a literal of Python."""
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{written(key)}: {written(one)}' for key, one in value.items())}}}"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
