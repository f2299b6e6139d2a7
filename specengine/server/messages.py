"""The turns of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from specengine.server.strict import Strict


def _as_text(value: Any) -> Any:
    """The text parts of a message, joined by newlines."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            named = str(part.get("type", "")) if isinstance(part, dict) else ""
            kind = f"of type {named[:64]}" if named not in ("", "text") else "of another form"
            raise ValueError(
                f'parts {kind} are not supported, only {{"type": "text", "text": ...}}'
            )
        if not isinstance(part["text"], str):
            raise ValueError("the text of a part must be a string")
    return "\n".join(part["text"] for part in value)


class CalledFunction(Strict):
    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """Arguments that are no JSON object stay the text that the model wrote."""
        try:
            parsed = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else self.arguments
        return {"name": self.name, "arguments": arguments}


class PastCall(Strict):
    """One call of an earlier answer."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"index": tuple(range(1024))}

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.for_template()}


class Message(Strict):
    """One turn. Content may be null where an assistant called tools."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "function_call": (),
        "audio": (),
        "annotations": ([],),
        "refusal": (),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = Field(default=None, validate_default=True)
    content: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        default=None, validate_default=True
    )

    @field_validator("tool_calls", "reasoning_content")
    @classmethod
    def _only_of_assistants(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role", "assistant") != "assistant":
            raise ValueError("belongs to the role assistant alone")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _only_of_tools(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "role" in info.data and (value is not None) != (info.data["role"] == "tool"):
            raise ValueError("belongs to the role tool, which needs it")
        return value

    @field_validator("content")
    @classmethod
    def _null_beside_calls_alone(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("tool_calls", True) in (None, []):
            raise ValueError("is required; it may be null beside tool_calls alone")
        return value

    def for_template(self) -> dict[str, Any]:
        """Templates know the developer by the older name of that role."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        turn["content"] = self.content or ""
        optional = {
            "name": self.name,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        return turn | {name: value for name, value in optional.items() if value is not None}


def with_ids(turns: list[dict[str, Any]], convert: Callable[[str], str]) -> list[dict[str, Any]]:
    """The turns with the ids of calls as `convert` writes them."""
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            call["id"] = convert(call["id"])
        if "tool_call_id" in turn:
            turn["tool_call_id"] = convert(turn["tool_call_id"])
    return turns
