"""The items of an answer as the model writes them, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from specengine.engine.outputs import RequestOutput
from specengine.engine.tokens import Vocabulary
from specengine.server.json_bytes import Json
from specengine.server.logprobs import chat_logprobs, shown
from specengine.server.parsing.answer import Delta
from specengine.server.parsing.choice import ChoiceParser

# Kind of delta -> (type of item, what its id begins with, type of its part).
_MESSAGE = ("message", "msg_", "output_text")
_REASONING = ("reasoning", "rs_", "reasoning_text")


class OutputWriter:
    """Writes `items`, one after the other; each is open until the next begins.

    parser: None where all text is content. vocabulary: of the logprobs, None where there are none.
    """

    def __init__(self, parser: ChoiceParser | None, vocabulary: Vocabulary | None) -> None:
        self.items: list[Json] = []
        self.reasoning = ""  # all of it
        self._parser = parser
        self._vocabulary = vocabulary
        self._is_open = False
        self._logprobs: list[Json] = []  # of tokens whose text is held back

    @property
    def needs_steps(self) -> bool:
        """Logprobs go to the items that came with them: an answer may not come in one piece."""
        return self._parser is not None and self._vocabulary is not None

    def feed(self, output: RequestOutput) -> Iterator[Json]:
        """The events of what is new, the end of the last item included; without their numbers."""
        ended = output.finish_reason is not None
        deltas = self._deltas(output.text_delta, ended)
        if self._vocabulary is not None:
            entries = shown(output.logprobs, output.finish_reason)
            self._logprobs += chat_logprobs(entries, self._vocabulary)["content"]
        for delta in deltas:
            yield from self._write(delta)
        if deltas:
            self._logprobs = []  # of no content
        if output.finish_reason is not None:
            if not self.items:
                yield from self._open_text(*_MESSAGE)
            is_cut = output.finish_reason.kind != "stop"
            yield from self.close("incomplete" if is_cut else "completed")

    def close(self, status: str) -> Iterator[Json]:
        """End the item that is open, if one is."""
        if not self._is_open:
            return
        self._is_open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", arguments=item["arguments"])
        else:
            part, place = item["content"][0], {"content_index": 0}
            extra = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._event(f"response.{part['type']}.done", text=part["text"], **extra, **place)
            yield self._event("response.content_part.done", part=dict(part), **place)
        yield self._item_event("response.output_item.done")

    def _deltas(self, text: str, ended: bool) -> list[Delta]:
        if self._parser is not None:
            return self._parser.feed(text, ended)
        return [Delta("content", [text])] if text else []

    def _write(self, delta: Delta) -> Iterator[Json]:
        if delta.kind == "call":
            yield from self._open_call(delta)
        elif delta.kind == "arguments":
            self.items[-1]["arguments"] += delta.text
            yield self._event("response.function_call_arguments.delta", delta=delta.text)
        else:
            yield from self._write_text(delta)

    def _write_text(self, delta: Delta) -> Iterator[Json]:
        kind = _MESSAGE if delta.kind == "content" else _REASONING
        if not self._is_open or self.items[-1]["type"] != kind[0]:
            yield from self._open_text(*kind)
        part = self.items[-1]["content"][0]
        part["text"] += delta.text
        event = self._event(f"response.{part['type']}.delta", content_index=0, delta=delta.text)
        if delta.kind == "content":
            event["logprobs"], self._logprobs = self._logprobs, []
            part["logprobs"] += event["logprobs"]
        else:
            self.reasoning += delta.text
        yield event

    def _open_text(self, kind: str, prefix: str, part_kind: str) -> Iterator[Json]:
        yield from self.close("completed")
        item: Json = {"id": prefix + uuid4().hex, "type": kind, "status": "in_progress"}
        item |= {"role": "assistant"} if kind == "message" else Json(summary=[])
        yield from self._open(item | {"content": []})
        part: Json = {"type": part_kind, "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        yield self._event("response.content_part.added", content_index=0, part=_copy(part))

    def _open_call(self, delta: Delta) -> Iterator[Json]:
        yield from self.close("completed")
        item = {
            "id": "fc_" + uuid4().hex,
            "type": "function_call",
            "status": "in_progress",
            "call_id": delta.id,
            "name": delta.text,
            "arguments": "",
        }
        yield from self._open(item)

    def _open(self, item: Json) -> Iterator[Json]:
        self.items.append(item)
        self._is_open = True
        yield self._item_event("response.output_item.added")

    def _event(self, kind: str, **fields: Any) -> Json:
        head = {"type": kind, "item_id": self.items[-1]["id"]}
        return head | {"output_index": len(self.items) - 1} | fields

    def _item_event(self, kind: str) -> Json:
        item = _copy(self.items[-1])
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}


def _copy(value: Json) -> Json:
    """As it is now: items grow."""
    return {name: list(one) if isinstance(one, list) else one for name, one in value.items()}
