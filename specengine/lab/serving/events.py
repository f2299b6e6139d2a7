"""The answer of a request: its events as they come, and what they tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "text", "token_ids")
_MOST_ERROR = 2_000  # bytes of a refusal that are kept


@dataclass
class Answer:
    """status: of HTTP, 0 before it came. times: of events that carry output, in seconds of the
    monotonic clock. num_tokens: by token ids, where events have them.

    usage, metrics: of the last event that has them. is_done: `[DONE]` came.
    """

    status: int = 0
    is_stream: bool = False
    is_done: bool = False
    times: list[float] = field(default_factory=list)
    last: float | None = None  # of the last event of a choice, its end too
    num_events: int = 0
    num_tokens: int = 0
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    error: str = ""
    _rest: bytes = b""

    def feed(self, data: bytes, now: float) -> None:
        """Raises ValueError where an event is no JSON."""
        if not self.is_stream:
            self._rest = (self._rest + data)[:_MOST_ERROR]
            return
        data = self._rest + data if self._rest else data
        if b"\r" in data:  # JSON holds none: these are ends of lines
            data = data.replace(b"\r\n", b"\n")
        *blocks, self._rest = data.split(b"\n\n")
        for block in blocks:
            self._take(block, now)

    def body(self) -> str:
        """Of an answer that is no stream: its beginning."""
        return self._rest.decode(errors="replace")

    def _take(self, block: bytes, now: float) -> None:
        if not block.startswith(b"data:"):
            lines = [one for one in block.split(b"\n") if one.startswith(b"data:")]
            if not lines:
                return  # a comment, or an event of another kind
            block = lines[0]
        payload = block[5:].strip()
        if payload == b"[DONE]":
            self.is_done = True
            return
        self.num_events += 1
        self._read(orjson.loads(payload), now)

    def _read(self, chunk: dict[str, Any], now: float) -> None:
        if chunk.get("error"):
            self.error = str(chunk["error"])[:_MOST_ERROR]
            return
        if usage := chunk.get("usage"):
            self.usage = usage
        if metrics := chunk.get("metrics"):
            self.metrics = metrics
        choices = chunk.get("choices")
        if not choices:
            return
        self.last = now
        has_output = False
        for choice in choices:
            has_output |= self._has_output(choice)
        if has_output:
            self.times.append(now)

    def _has_output(self, choice: dict[str, Any]) -> bool:
        """Whether tokens came with it. An event of no text counts too, as one of a token whose
        bytes wait for more; one that opens or closes a choice does not."""
        finish = choice.get("finish_reason")
        if finish is not None:
            self.finish_reason = finish
        delta = choice.get("delta", choice)
        if ids := choice.get("token_ids"):
            self.num_tokens += len(ids)
            return True
        for name in _TEXTS:
            if delta.get(name):
                return True
        return finish is None and "role" not in delta and "prompt_token_ids" not in choice
