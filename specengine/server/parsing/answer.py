"""What parsers make of one answer: reasoning, content and tool calls, whole and as deltas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

Kind = Literal["content", "reasoning_content", "call", "arguments"]


def new_call_id() -> str:
    return "call_" + uuid4().hex[:24]


class Lane:
    """Text without the whitespace at its end, which waits until more text comes."""

    def __init__(self, trims: bool = True) -> None:
        self._pieces: list[str] = []
        self._trims = trims  # drop whitespace until something else comes
        self._before = ""  # goes before what comes next

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> str:
        """What can be shown of it now."""
        text = text.lstrip() if self._trims else text
        if not text:
            return ""
        self._trims = False
        text = self._before + text
        shown = text.rstrip()
        self._before = text[len(shown) :]
        if shown:
            self._pieces.append(shown)
        return shown

    def cut(self) -> None:
        """Drop the whitespace here. What comes next is on a new line, if it is not the first."""
        self._before, self._trims = "\n" if self._pieces else "", True

    def finish(self) -> str:
        """The whitespace that waits."""
        space, self._before = "" if self._trims else self._before, ""
        self._pieces.append(space)
        return space


@dataclass(eq=False)
class Call:
    """One call of a function."""

    id: str
    name: str
    lane: Lane = field(default_factory=Lane)

    @property
    def arguments(self) -> str:
        return self.lane.text

    def json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Delta:
    """What came. `call` is the index of the call that a delta of kind call or arguments belongs to;
    the text of kind call is the function's name."""

    kind: Kind
    pieces: list[str]
    call: int = -1
    id: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def json(self) -> dict[str, Any]:
        """The `delta` of a chunk."""
        if self.kind == "call":
            function = {"name": self.text, "arguments": ""}
            head = {"index": self.call, "id": self.id, "type": "function"}
            return {"tool_calls": [head | {"function": function}]}
        if self.kind == "arguments":
            return {"tool_calls": [{"index": self.call, "function": {"arguments": self.text}}]}
        return {self.kind: self.text}


class ParsedAnswer:
    """Parsers write to it; `take` gives what came since, of one kind in one delta.

    most_calls: further calls are dropped.
    """

    def __init__(
        self, most_calls: int | None = None, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self.calls: list[Call] = []
        self._content, self._reasoning = Lane(trims=False), Lane()
        self._deltas: list[Delta] = []
        self._most_calls = most_calls
        self._new_id = new_id
        self._dropped = False  # the call that is written is one too many

    @property
    def content(self) -> str:
        return self._content.text

    @property
    def reasoning(self) -> str:
        return self._reasoning.text

    def message(self) -> dict[str, Any]:
        """The fields of a chat message that are not the same in all of them."""
        message: dict[str, Any] = {"content": self.content}
        if self.calls:
            message["tool_calls"] = [call.json() for call in self.calls]
        if self.calls or self.reasoning:
            message["content"] = self.content or None
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message

    def add_content(self, text: str) -> None:
        self._say("content", self._content.add(text))

    def add_reasoning(self, text: str) -> None:
        self._say("reasoning_content", self._reasoning.add(text))

    def cut(self) -> None:
        """One part of the answer ends, and the whitespace around its end does not count."""
        self._content.cut()
        self._reasoning.cut()

    def open_call(self, name: str, call_id: str | None = None) -> None:
        self.cut()
        self._dropped = self._most_calls is not None and len(self.calls) >= self._most_calls
        if self._dropped:
            return
        call = Call(call_id or self._new_id(), name)
        self._deltas.append(Delta("call", [name], len(self.calls), call.id))
        self.calls.append(call)

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call that was opened last, as JSON."""
        if not self._dropped:
            self._say("arguments", self.calls[-1].lane.add(text))

    def close_call(self) -> None:
        """A call without arguments has none: an empty object."""
        if not self._dropped and not self.calls[-1].arguments:
            self.add_arguments("{}")

    def finish(self) -> None:
        """The text has ended."""
        if not self.calls:
            self._say("content", self._content.finish())

    def take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _say(self, kind: Kind, text: str) -> None:
        if not text:
            return
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.kind == kind:
            last.pieces.append(text)  # calls do not interleave: these are the same call's
        else:
            self._deltas.append(Delta(kind, [text], len(self.calls) - 1))
