"""Offline inference: what one prompt of a list cannot have, and what the others get."""

from __future__ import annotations

from typing import Any

import pytest

from specengine import LLM, GrammarSpec, SamplingParams
from specengine.core.errors import RequestError

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", device="cpu", dtype="float32", max_total_tokens=512)


class FailsAtThird:
    """A grammar that allows all text, and whose parser fails at the third token."""

    is_complete = False
    error: str | None = None

    def __init__(self) -> None:
        self.count = 0

    def accept(self, token: int) -> bool:
        self.count += 1
        self.error = "too many items" if self.count == 3 else None
        return self.error is None

    def take_back(self, count: int) -> None:
        self.count -= count

    def fill_mask(self, words: Any) -> None:
        words.fill(-1)


def test_prompt_whose_grammar_fails_leaves_the_others_their_generations(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = llm.generate(["Hello"], GREEDY)
    monkeypatch.setattr(llm.engine.parts.grammars, "start", lambda spec: FailsAtThird())
    grammar = SamplingParams(max_tokens=6, temperature=0, grammar=GrammarSpec.regex("a*"))
    good, bad = llm.generate(["Hello", "Bye"], [GREEDY, grammar])
    assert good.token_ids == expected.token_ids
    reason = bad.completions[0].finish_reason
    assert reason.kind == "error"
    assert "simplify it" in (reason.message or "")
    assert len(bad.token_ids) == 3
    assert not llm.engine.has_work


def test_prompt_that_is_no_text_is_refused_before_any_is_queued(llm: LLM) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        llm.generate(["Hello", "\ud800"], GREEDY)
    assert not llm.engine.has_work
