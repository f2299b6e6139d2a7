"""Rounds in half precision whose tokens the head's own kernel chooses, on a CPU by emulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM
from specengine.engine.llm import Generation
from specengine.kernels.head import head_best_cuda, head_topk_cuda
from specengine.layers.head import Head
from specengine.runner.loader import load
from tests.e2e.near_ties import assert_same_but_for_ties
from tests.kernels.counted_rows import count_rows
from tests.kernels.emulated_cuda import COMPILER, Compiled
from tests.kernels.emulated_head import emulate_head, let_heads_take_it
from tests.support.device_rounds import chain_of, run_on_device
from tests.support.rounds import GREEDY, PROMPTS

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the kernel itself"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler, or not Linux"),
]


@pytest.fixture
def rows(emulated: Compiled, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the kernel, which heads take from now on."""
    monkeypatch.setattr(load, "pack_linears", lambda *_: None)  # as on a GPU
    emulate_head(emulated, 3, monkeypatch)
    let_heads_take_it(monkeypatch)
    return count_rows(head_best_cuda, "head_best", monkeypatch)


@pytest.fixture
def tree_rows(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the kernel that finds the top-k of the draft's logits."""
    return count_rows(head_topk_cuda, "head_topk", monkeypatch)


SHORT = replace(GREEDY, max_tokens=8)
GIVEN: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 2048, "device": "cpu"}


@pytest.mark.parametrize("name", ["plain", "EAGLE", "EAGLE3"])
def test_tokens_of_the_head_kernel_are_those_of_logits(
    name: str,
    target: Path,
    drafters: dict[str, str],
    rows: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, spec = GIVEN, chain_of(name, drafters)
    params = replace(SHORT, logprobs=2)
    expected = LLM(str(target), None, **given).generate(PROMPTS, params, progress=False)
    assert not rows, "logits were asked for"
    llm = LLM(str(target), spec, **given)
    rounds = run_on_device(llm)
    found = llm.generate(PROMPTS, SHORT, progress=False)
    assert rounds.counters["replays"] > 3
    # Four requests, one of them padding: a row each, and four each in a verification.
    assert {4, 16} <= set(rows) if spec else set(rows) == {4}, set(rows)
    assert assert_same_but_for_ties(found, expected) == 0


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3"])
def test_trees_of_the_head_kernel_are_those_of_logits(
    name: str,
    target: Path,
    drafters: dict[str, str],
    tree_rows: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same drafts are accepted, and the tokens are the same."""
    chain = chain_of(name, drafters)
    assert chain is not None
    spec = replace(chain, eagle_topk=4, num_draft_tokens=4)

    def answer() -> list[Generation]:
        tree_rows.clear()
        llm = LLM(str(target), spec, **GIVEN)
        rounds = run_on_device(llm)
        found = llm.generate(PROMPTS, SHORT, progress=False)
        assert rounds.counters["replays"] > 3
        return found

    found = answer()
    # Four requests, one of them padding: a row for each root, four each below.
    assert {4, 16} <= set(tree_rows), set(tree_rows)
    monkeypatch.setattr(Head, "top", lambda *_: None)
    expected = answer()
    assert not tree_rows
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    accepted = [sum(one.spec.num_accepted for one in each) for each in (found, expected)]
    assert abs(accepted[0] - accepted[1]) <= 2, accepted
    assert accepted[0] > 0
