"""Calls whose arguments are written one by one between tags, as text or as JSON."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specengine.core.errors import RequestError
from specengine.server.parsing.answer import ParsedAnswer
from specengine.server.parsing.json_text import copy_value, quoted
from specengine.server.parsing.reader import Reader, Steps, ignore
from specengine.server.tools.format import Tool, ToolFormat, Tools
from specengine.server.tools.lark import Lark

MOST_DEPTH = 32  # of a schema's alternatives
_PYTHON = {"True": "true", "False": "false", "None": "null"}
# What a text between tags is not checked for.
_UNCHECKED = ("pattern", "format", "minLength", "maxLength")


@dataclass(frozen=True)
class Tags:
    """Around a call, the key of an argument, and its value. Of value_ends the first is what the
    model writes. lead: what comes before value_start. tail: what follows the value's end."""

    call_start: str
    key_start: str
    key_end: str
    value_start: str
    value_ends: tuple[str, ...]
    call_end: str
    lead: str = "\n"
    tail: str = "\n"


class TaggedFormat(ToolFormat):
    """A value is text where its schema says so. Others are JSON, and text where they are not."""

    tags: Tags

    def read(self, reader: Reader, answer: ParsedAnswer, tools: Tools) -> Steps[None]:
        while (yield from reader.upto([self.tags.call_start], answer.add_content)) is not None:
            reader.mark()
            name = yield from self.read_name(reader)
            if not name:
                reader.back()
                answer.add_content(self.tags.call_start)
                continue
            reader.keep()
            answer.open_call(name)
            yield from self._read_arguments(reader, answer, tools.get(name))

    @abstractmethod
    def read_name(self, reader: Reader) -> Steps[str]:
        """The function's name, after call_start; empty where there is none."""

    def _read_arguments(
        self, reader: Reader, answer: ParsedAnswer, tool: Tool | None
    ) -> Steps[None]:
        tags, count = self.tags, 0
        while (yield from reader.upto([tags.key_start, tags.call_end], ignore)) == tags.key_start:
            key: list[str] = []
            if (yield from reader.upto([tags.key_end], key.append)) is None:
                break
            name = "".join(key).strip()
            yield from reader.take(tags.lead)
            yield from reader.take(tags.value_start)
            answer.add_arguments(f'{", " if count else "{"}"{quoted(name)}": ')
            count += 1
            schema = {} if tool is None else tool.property_schema(name)
            if not (yield from self._read_value(reader, answer, schema)):
                return
        if count:
            answer.add_arguments("}")
        answer.close_call()

    def _read_value(self, reader: Reader, answer: ParsedAnswer, schema: Any) -> Steps[bool]:
        ends = self.tags.value_ends
        if types_of(schema) == {"string"}:
            answer.add_arguments('"')
            end = yield from reader.upto(ends, lambda text: answer.add_arguments(quoted(text)))
            if end is None:
                return False
            answer.add_arguments('"')
            return True
        pieces: list[str] = []
        reader.mark()
        is_whole = yield from copy_value(reader, pieces.append)  # which may have an end within
        yield from reader.skip_space()
        if is_whole and (yield from reader.take(ends[-1])):
            reader.keep()
        else:
            reader.back()
            pieces.clear()
            if (yield from reader.upto(ends, pieces.append)) is None:
                return False
        answer.add_arguments(_as_json("".join(pieces)))
        return True

    def arguments(self, lark: Lark, tool: Tool) -> str:
        schema = tool.parameters
        required = schema.get("required", ())
        one_by_one = []
        for name, one in (schema.get("properties") or {}).items():
            written = self._argument(lark, tool, name, one)
            one_by_one.append(written if name in required else f"({written})?")
        return " ".join(one_by_one)

    def _argument(self, lark: Lark, tool: Tool, name: str, schema: Any) -> str:
        tags, end = self.tags, self.tags.value_ends[0]
        head = lark.literal(f"{tags.key_start}{name}{tags.key_end}{tags.lead}{tags.value_start}")
        tail = lark.literal(tags.tail)
        if "string" not in types_of(schema):
            definitions = {
                k: tool.parameters[k] for k in ("$defs", "definitions") if k in tool.parameters
            }
            value = lark.json({**definitions, **schema}, is_lenient=not tool.is_strict)
            return f"{head} {value} {lark.literal(end)} {tail}"
        unchecked = [word for word in _UNCHECKED if word in schema]
        if tool.is_strict and unchecked:
            raise RequestError(
                f"tools: {tool.name} is strict, but {unchecked[0]} of {name} cannot be enforced in "
                "this model's format; leave it out of the schema, or strict out of the tool",
                "tools",
            )
        if "enum" in schema:
            choices = " | ".join(lark.literal(str(one)) for one in schema["enum"])
            return f"{head} ({choices}) {lark.literal(end)} {tail}"
        return f"{head} {lark.upto(tags.value_ends[-1])} {tail}"


def types_of(schema: Any, depth: int = 0) -> set[str]:
    """The JSON types that a schema names; empty where it names none. Takes any JSON."""
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        return set()
    named = schema.get("type")
    types = {one for one in [named, *_listed(named)] if isinstance(one, str)}
    for word in ("anyOf", "oneOf"):
        types = types.union(*(types_of(one, depth + 1) for one in _listed(schema.get(word))))
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if not types and values:
        types = {"string" if isinstance(one, str) else "other" for one in values}
    return types


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_json(text: str) -> str:
    stripped = text.strip()
    stripped = _PYTHON.get(stripped, stripped)
    try:
        json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return f'"{quoted(text)}"'
    return stripped


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
