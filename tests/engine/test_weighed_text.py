"""Chains of text under target_only, in rounds on the device alone: a seed says what it says on the
host, whatever earlier rounds have left behind short drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specengine import SpecConfig
from specengine.core.sampling import SpecControl
from specengine.engine.graph_weighed import GraphWeighedRound
from tests.engine.flying_world import come_and_go, let_fly
from tests.engine.test_graph_round import GREEDY, SAMPLED, make
from tests.engine.test_graph_weighed import MANY, ON_CPU, check, fallbacks, flags
from tests.engine.test_weighed_wishes import WISHES
from tests.engine.test_weighed_wishes import check as check_wishes

SPECS = {
    "NGRAM": SpecConfig(algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=6),
    "SUFFIX": SpecConfig(algorithm="SUFFIX", num_draft_tokens=8),
    "hybrid": SpecConfig(
        algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=6, hybrid_suffix=True
    ),
}
SPECS = {name: replace(one, verify="target_only", adaptive=False) for name, one in SPECS.items()}
SURE = replace(GREEDY, temperature=0.15, top_k=3, seed=21)
ENDS = [  # by max_tokens and by context, limits, and greedy ones among those that sample
    replace(SURE, max_tokens=23),
    replace(GREEDY, max_tokens=20),
    replace(SURE, max_tokens=None, seed=22),
    replace(SURE, max_tokens=40, speculative=SpecControl(num_steps=1)),
    replace(SAMPLED[4], max_tokens=2),
    replace(SURE, max_tokens=None, seed=23, speculative=SpecControl(num_steps=4)),
    replace(SURE, max_tokens=30, speculative=SpecControl(enabled=False)),
    replace(SAMPLED[6], max_tokens=31),
]


@ON_CPU
@pytest.mark.parametrize("overlaps", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("name", SPECS)
def test_seeds_say_what_they_say_on_the_host(
    name: str, overlaps: bool, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, llm = (make(target, SPECS[name], **flags()) for _ in range(2))
    flying = let_fly(llm, monkeypatch, overlaps, most=8)
    assert isinstance(flying, GraphWeighedRound)
    check(host, llm, ENDS)
    for count in (3, 8):  # what larger rounds have left stands behind
        check(host, llm, [replace(one, seed=40 + count) for one in ENDS[:count]], MANY[-count:])
    assert not fallbacks(flying)
    assert {form.num_steps for form in flying.captured if form.choosing.weighs} > {0, 3}
    totals = llm.engine.scheduler.spec_totals
    assert 30 < totals.num_accepted_tokens < totals.num_draft_tokens - 30


@ON_CPU
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("name", ["NGRAM", "SUFFIX"])
def test_wishes_fly(name: str, wish: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, llm = (make(target, SPECS[name], **flags()) for _ in range(2))
    flying = let_fly(llm, monkeypatch, most=8)
    check_wishes(host, llm, WISHES[wish])
    assert not fallbacks(flying)
    assert any(form.choosing.weighs and form.num_steps for form in flying.captured)


@ON_CPU
@pytest.mark.parametrize("name", ["NGRAM", "SUFFIX"])
def test_greedy_requests_alone_are_matched(
    name: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, llm = (make(target, SPECS[name], **flags()) for _ in range(2))
    flying = let_fly(llm, monkeypatch)
    found, expected = (one.generate(MANY[:3], [GREEDY] * 3) for one in (llm, host))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert not any(form.choosing.weighs for form in flying.captured)
    assert not fallbacks(flying)


@ON_CPU
@pytest.mark.parametrize("name", ["NGRAM", "SUFFIX"])
def test_requests_come_and_go(name: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, llm = (make(target, SPECS[name], **flags()) for _ in range(2))
    flying = let_fly(llm, monkeypatch, most=8)
    come_and_go(host, llm, MANY, [*ENDS, *WISHES["all"], *WISHES["grammars"]], monkeypatch)
    assert flying.counters["replays"] > 20
    assert not fallbacks(flying)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", SPECS)
    def test_graphs_change_nothing(self, name: str, overlap: bool, target: Path) -> None:
        more = flags(disable_radix_cache=True, disable_overlap_schedule=not overlap)
        host = make(target, SPECS[name], disable_cuda_graph=True, **more)
        llm = make(target, SPECS[name], **more)
        for count in (8, 3, 1):
            check(host, llm, ENDS[:count], MANY[:count])
        for params in WISHES.values():
            check_wishes(host, llm, params)
        stats = llm.engine.stats().graphs["round"]
        assert stats.replays > 40
        assert not stats.fallbacks
