"""Drafts that a grammar cuts do not count in matched rounds on the device, as on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specengine import GrammarSpec, SpecConfig
from specengine.core.sampling import SpecControl
from specengine.engine.round_form import Flight
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_ruled import FREE, ON_CPU, SAMPLED, make
from tests.engine.test_graph_ruled import specs as specs
from tests.engine.test_weighed_wishes import said

# It is they that end requests: near other ends, rounds on the device draft more.
LONG = {"max_tokens": 99, "ignore_eos": False}
LETTERS, DIGITS = GrammarSpec.regex("[a-z ]{9,30}"), GrammarSpec.regex("[0-5]{25,30}")
WISHES = [
    replace(SAMPLED, grammar=LETTERS, **LONG),
    replace(FREE, grammar=DIGITS, **LONG),
    replace(SAMPLED, grammar=DIGITS, speculative=SpecControl(num_steps=2), **LONG),
    FREE,
]
PROMPTS = ["The quick brown fox", "0123456789" * 4, "0123012301230123", "x"]


@ON_CPU
@pytest.mark.parametrize("name", ["EAGLE3", "a tree", "NGRAM", "a tree of text"])
def test_counts_are_those_of_the_host(
    name: str,
    target: Path,
    specs: dict[str, SpecConfig | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, llm = make(target, specs[name]), make(target, specs[name])
    flying = let_fly(llm, monkeypatch)
    for count in (4, 3, 2, 1):
        given = PROMPTS[:count], WISHES[:count]
        found, expected = llm.generate(*given), host.generate(*given)
        assert [*said(found[:3])] == [*said(expected[:3])]
    assert flying.counters.keys() == {"captures", "replays"}
    assert llm.engine.scheduler.spec_totals.num_draft_tokens > 20


def test_what_lies_deeper_than_a_request_drafts_is_not_counted() -> None:
    flight = Flight(*[None] * 7, {1: [1, 1, 2, 3]})  # type: ignore[arg-type]
    assert flight.left([9, 9, 9], [2, 2, 2]) == [9, 3, 9]
    assert flight.left([9, 2, 9], [3, 3, 3]) == [9, 2, 9]
