"""The items of `input`, and the chat messages that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError

from specengine.core.errors import RequestError
from specengine.server.errors import of_validation
from specengine.server.strict import Strict

Turn = dict[str, Any]  # a message of /v1/chat/completions
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _as_text(value: Any) -> Any:
    """The text parts, joined by newlines."""
    if not isinstance(value, list):
        return value
    return "\n".join(map(_text_of, value))


def _text_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in (*_TEXTS, "refusal") or not isinstance(text, str):
        raise ValueError(f"parts of type {kind!r} are not supported; give input_text parts")
    return text


Text = Annotated[str, BeforeValidator(_as_text)]


class Item(Strict):
    """Each may have an id and a status, as an earlier answer gave them; nothing depends on
    them."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"phase": ("final_answer", "commentary")}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class CallItem(Item):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"async": (False,), "namespace": ()}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    caller: Any = Field(default=None, description="accepted; nothing depends on it")

    def tool_call(self) -> Turn:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class CallOutputItem(Item):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"namespace": ()}

    type: Literal["function_call_output"]
    call_id: str
    output: Text
    name: str | None = None
    caller: Any = Field(default=None, description="accepted; nothing depends on it")


class ReasoningItem(Item):
    """encrypted_content is another server's: this one writes reasoning as content."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"encrypted_content": ()}

    type: Literal["reasoning"]
    summary: Text | None = None
    content: Text | None = None


ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


def as_items(value: Any) -> Any:
    """A text is a message of the user. Raises ApiError, RequestError and ValueError."""
    if isinstance(value, str):
        value = [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, or a list of items that is not empty")
    return [_as_item(place, one) for place, one in enumerate(value)]


def _as_item(place: int, value: Any) -> Item:
    param = f"input[{place}]"
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object", param)
    kind = value.get("type") or "message"
    if kind not in ITEMS:
        known = ", ".join(ITEMS)
        raise RequestError(f"items of type {kind!r} are not supported; known: {known}", param)
    try:
        return ITEMS[kind].model_validate(value | {"type": kind})
    except RequestError as error:
        raise RequestError(str(error), f"{param}.{error.param}") from None
    except ValidationError as error:
        raise of_validation(error.errors()[0], ("input", place)) from None


def as_turns(instructions: str | None, items: Sequence[Item]) -> list[Turn]:
    """Messages of a chat. What an assistant thought, said and called in a row is one message."""
    turns: list[Turn] = []
    if instructions is not None:
        turns.append({"role": "system", "content": instructions})
    answer: Turn = {}  # of the assistant, as far as it has come

    def end_answer() -> None:
        if answer:
            content = answer.get("content", None if "tool_calls" in answer else "")
            turns.append({"role": "assistant", **answer, "content": content})
            answer.clear()

    for item in items:
        if isinstance(item, ReasoningItem):
            if "content" in answer or "tool_calls" in answer:
                end_answer()
            thought = item.content or item.summary or ""
            answer["reasoning_content"] = answer.get("reasoning_content", "") + thought
        elif isinstance(item, CallItem):
            answer.setdefault("tool_calls", []).append(item.tool_call())
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if "content" in answer or "tool_calls" in answer:
                end_answer()
            answer["content"] = item.content
        else:
            end_answer()
            turns.append(_turn(item))
    end_answer()
    return turns


def _turn(item: Item) -> Turn:
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
    assert isinstance(item, MessageItem)
    return {"role": item.role, "content": item.content}
