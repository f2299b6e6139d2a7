"""Answers of many choices, which keep no other request waiting for long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specengine.server.chat import ChatShape
from specengine.server.completions import CompletionShape
from specengine.server.native.answer import NativeAnswer

MESSAGES = [{"role": "user", "content": "x"}]


class Turns:
    """Counts the turns of the event loop from the first call on, and notes each call's."""

    def __init__(self) -> None:
        self.count = 0
        self.noted: list[int] = []

    def note(self) -> None:
        if not self.noted:
            self._tick()
        self.noted.append(self.count)

    def _tick(self) -> None:
        self.count += 1
        if self.count < 1000:
            asyncio.get_running_loop().call_soon(self._tick)


@pytest.mark.parametrize(
    ("shape", "method", "path", "body"),
    [
        (
            ChatShape,
            "whole",
            "/v1/chat/completions",
            {"messages": MESSAGES},
        ),
        (CompletionShape, "whole", "/v1/completions", {"prompt": "x"}),
        (NativeAnswer, "_told", "/generate", {"text": "x"}),
    ],
)
def test_each_choice_of_an_answer_has_a_turn_of_its_own(
    site: Any,
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    shape: Any,
    method: str,
    path: str,
    body: dict[str, Any],
) -> None:
    turns, tell = Turns(), getattr(shape, method)

    def noted(self: Any, *given: Any) -> Any:
        turns.note()
        return tell(self, *given)

    monkeypatch.setattr(shape, method, noted)
    n: dict[str, Any] = {"sampling_params": {"n": 5}} if path == "/generate" else {"n": 5}
    answer = site.post(path, model="fake", **body, **n).json()
    told = answer if path == "/generate" else answer["choices"]
    assert len(told) == len(set(turns.noted)) == 5
