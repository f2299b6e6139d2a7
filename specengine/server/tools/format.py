"""What a format of tool calls is."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specengine.server.parsing.answer import ParsedAnswer, new_call_id
from specengine.server.parsing.reader import Reader, Steps
from specengine.server.tools.lark import Lark

# A function's name, as a reader runs over it.
NAME = re.compile(r"[\w.-]*", re.ASCII)
Schema = Mapping[str, Any]
NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments."""

    name: str
    parameters: Schema = field(default_factory=lambda: NO_PARAMETERS)
    is_strict: bool = False

    def property_schema(self, name: str) -> Any:
        """The schema of one argument; empty where there is none."""
        properties = self.parameters.get("properties")
        return properties.get(name, {}) if isinstance(properties, Mapping) else {}


Tools = Mapping[str, Tool]  # by name


@dataclass(frozen=True)
class Layout:
    """How calls are written: open, then each call as before + name + middle + arguments + after,
    with `separator` between them, then close. trigger: what open + before begins with, which
    distinguishes a call from text; empty where the first character alone does."""

    before: str
    middle: str
    after: str = ""
    open: str = ""
    separator: str = ""
    close: str = ""
    trigger: str = ""


class ToolFormat(ABC):
    """Reads calls from an answer, and says how they are written.

    markers: texts that may be special tokens of the model; they are shown to `read`.
    signs: texts that are all in a chat template if, and only if, it is one for this format.
    has_parallel_calls: whether one answer may hold several calls.
    """

    markers: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    has_parallel_calls: bool = True

    @abstractmethod
    def read(self, reader: Reader, answer: ParsedAnswer, tools: Tools) -> Steps[None]:
        """Read up to the end of the text. What is no call is content, as it is; arguments that are
        malformed are handed on as they are."""

    @abstractmethod
    def layout(self, lark: Lark) -> Layout:
        """How the model that `lark` is for writes calls."""

    def arguments(self, lark: Lark, tool: Tool) -> str:
        """The Lark expression of the arguments. Raises RequestError for a schema that cannot be
        followed in this format."""
        return lark.json(tool.parameters, is_lenient=not tool.is_strict)

    def new_id(self) -> str:
        """The id of a call that the model gave none."""
        return new_call_id()

    def template_id(self, call_id: str) -> str:
        """An id from the conversation, as the model's chat template takes it."""
        return call_id

    def template_turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """A turn of the conversation, as the model's chat template takes it. turn: fields by name,
        as server/messages.py has them."""
        return dict(turn)


class AnswerFormat(ToolFormat):
    """A format of the whole answer: reasoning, text and calls. Answers are read by it with tools or
    without, and no reasoning parser is used with it unless one is chosen by name."""

    @abstractmethod
    def frame(self, lark: Lark, calls: str | None, body: str | None) -> str:
        """The Lark expression of an answer: what may come before it, then `calls`, or `body`. Both
        are Lark expressions; None where it is not allowed."""
