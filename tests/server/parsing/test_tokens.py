"""Tokens that arrive in any runs give the same events, joined: what speculation does to answers.

A run of accepted tokens may end anywhere, within a character, a tag, a name or an argument.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from specengine.core.request import FinishReason
from specengine.core.sampling import SamplingParams
from specengine.engine.detokenizer import Detokenizer
from specengine.server.reasoning.tags import Stage
from tests.server.parsing.answers import CASES, Case, Parsed, parse
from tests.server.parsing.test_answers import written

TINY = Path(__file__).resolve().parents[3] / "target/zoo/tiny"
# Characters of several tokens each, beside every boundary that a format has.
CITY = 'żółw 😀 </tool_call> \\"[a]'


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def pieces(tokens: list[int], cuts: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """The text of each run, as a front end makes it."""
    detokenizer = Detokenizer(tokenizer(), SamplingParams(stop=stop, skip_special_tokens=False))
    edges = [0, *sorted(cuts), len(tokens)]
    runs = [tokens[start:end] for start, end in pairwise(edges)]
    *first, last = runs
    return [*(detokenizer.add(run, None) for run in first), detokenizer.add(last, END)]


END = FinishReason("stop")


def parsed(case: Case, tokens: list[int], cuts: list[int]) -> Parsed:
    return parse(case.format, pieces(tokens, cuts), case.stage)


@settings(deadline=None)  # the first loads the tokenizer
@given(st.sampled_from(CASES), st.data())
def test_runs_of_any_length_give_the_same(case: Case, data: Any) -> None:
    tokens = tokenizer()(case.text, add_special_tokens=False).input_ids
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=20))
    whole = parsed(case, tokens, [])
    assert whole == case.parsed
    assert parsed(case, tokens, cuts) == whole


@pytest.mark.parametrize(
    "name",
    [
        *("hermes", "llama3_json", "mistral", "pythonic", "glm45", "gpt_oss"),
        *("qwen3_coder", "deepseek_v3", "deepseek_v31"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_streamed_arguments_across_runs(name: str, size: int) -> None:
    city = "żółw 😀" if name in ("glm45", "qwen3_coder") else CITY  # these do not escape tags
    more = [1, {"a": "é"}]
    text = written(name, city, -7, more)
    tokens = tokenizer()(text, add_special_tokens=False).input_ids
    found = parse(name, pieces(tokens, list(range(size, len(tokens), size))), Stage.BEFORE)
    ((called, arguments),) = found.calls
    assert (called, found.content) == ("weather", "")
    assert json.loads(arguments) == {"city": city, "days": -7, "more": more}
