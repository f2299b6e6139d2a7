"""Decode and prefill graphs give what eager forwards give; on a CPU their graphs are functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams
from specengine.core.errors import GraphInputError
from specengine.engine.outputs import GraphStats
from tests.support.cpu_graphs import capture_on_the_cpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="graphs are tested where there is a GPU"
)
PROMPTS = ["abcabcabcabcabc", "x", "0123456789" * 4]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)


def make(folder: Path) -> LLM:
    flags: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_total_tokens": 1024}
    return LLM(str(folder), context_length=80, **flags)


def tokens(llm: LLM, count: int) -> list[list[int]]:
    sampled = replace(GREEDY, temperature=0.9, seed=3)
    params = [GREEDY, sampled, GREEDY][:count]
    return [one.token_ids for one in llm.generate(PROMPTS[:count], params)]


def test_replayed_forwards_give_the_tokens_of_eager_ones(
    small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, replayed = make(small_models["llama"]), make(small_models["llama"])
    capture_on_the_cpu(replayed, [1, 4], monkeypatch)
    for count in (1, 3):
        assert tokens(replayed, count) == tokens(eager, count)
    stats = replayed.engine.stats().graphs
    assert stats["decode"] == GraphStats(captures=2, replays=14)
    assert stats["prefill"].replays == 2
    assert stats["prefill"].captures == 3, "keys no wider than the context: 16, 32 and 64 tokens"
    runner = replayed.engine.parts.worker.runner
    assert runner.decode_graphs is not None
    assert [*runner.decode_graphs.cache.captured] == [4, 1], "the largest comes first"


def test_moved_page_table_is_refused_by_the_guard_of_either_kind(
    small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(small_models["llama"])
    runner = llm.engine.parts.worker.runner
    runner.guards_graphs = True
    capture_on_the_cpu(llm, [1], monkeypatch)
    tokens(llm, 1)
    table = runner.pools.req_to_token_pool
    table.req_to_token = table.req_to_token.clone()
    with pytest.raises(GraphInputError, match=r"graphs\.context\.pools.*\.req_to_token at"):
        tokens(llm, 1)
    runner.prefill_graphs = None
    with pytest.raises(GraphInputError, match=r"graphs\.context\.pools.*\.req_to_token at"):
        tokens(without_requests(llm), 1)


def without_requests(llm: LLM) -> LLM:
    """The engine after a failed step, ready for another request."""
    for req in [*llm.engine.choices]:
        llm.engine.abort(req.rid.split("#")[0])
    return llm
