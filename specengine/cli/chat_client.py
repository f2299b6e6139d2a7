"""One greedy question to an OpenAI-compatible endpoint, over plain HTTP."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Endpoint:
    """One engine behind HTTP."""

    title: str
    url: str
    model: str

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """A greedy chat completion."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }


@dataclass
class Reply:
    text: str
    num_tokens: int
    seconds: float  # from the first token to the last
    accepted_length: float  # tokens a round, the bonus token included

    @property
    def tokens_per_second(self) -> float:
        return (self.num_tokens - 1) / self.seconds if self.seconds else 0.0


def ask(endpoint: Endpoint, prompt: str, max_tokens: int, show: Callable[[str], None]) -> Reply:
    """Stream the answer; `show` gets the text so far with every chunk."""
    text, begin, end, last = "", 0.0, 0.0, {}
    for chunk in _stream(endpoint.url, endpoint.body(prompt, max_tokens)):
        last = chunk
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") or ""
            end = perf_counter()
            begin = begin or end
            text += piece
            show(text)
    spec = last["metrics"]["speculative_decoding"]
    tokens = last["usage"]["completion_tokens"]
    return Reply(text, tokens, end - begin, spec["mean_acceptance_length"])


def _stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=content.encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)
