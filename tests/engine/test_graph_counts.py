"""What is counted of rounds on the device is what is counted of rounds of the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SpecConfig
from specengine.draft.standalone.worker import StandaloneWorker
from tests.engine.flying_world import let_fly
from tests.engine.test_depth_in_results import GREEDY, ON_CPU, PROMPTS

TOKENS = range(2, 14)  # every way in which an output may end within a round
STEPS, TOPK = 3, 3


def make(target: Path, algorithm: str, draft: str, **shape: Any) -> LLM:
    spec = SpecConfig(
        algorithm=algorithm, adaptive=False, draft_model_path=draft, num_steps=STEPS, **shape
    )
    given = {"dtype": "float32", "max_total_tokens": 2048, "disable_cuda_graph": True}
    return LLM(str(target), spec, **given)


@ON_CPU
@pytest.mark.parametrize("overlaps", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3"])
def test_where_outputs_end(
    algorithm: str,
    overlaps: bool,
    target: Path,
    drafters: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = str(target) if algorithm == "STANDALONE" else drafters[algorithm]
    host, device = make(target, algorithm, draft), make(target, algorithm, draft)
    if isinstance(device.engine.drafter, StandaloneWorker):
        device.engine.drafter.flies = True
    flying = let_fly(device, monkeypatch, overlaps)
    for count in TOKENS:
        params = replace(GREEDY, max_tokens=count)
        pairs = zip(host.generate(PROMPTS, params), device.generate(PROMPTS, params), strict=True)
        for its, mine in pairs:
            assert mine.token_ids == its.token_ids
            assert mine.spec.num_draft_tokens == its.spec.num_draft_tokens
            assert mine.spec.histogram == its.spec.histogram
    totals = device.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert flying.counters["replays"] > len(TOKENS)
    if algorithm == "STANDALONE":
        assert totals.num_accepted_tokens == totals.num_draft_tokens, "it drafts for itself"


@ON_CPU
def test_of_trees_the_levels_that_may_stand(
    target: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target, "EAGLE3", drafters["EAGLE3"], eagle_topk=TOPK, num_draft_tokens=9)
    let_fly(llm, monkeypatch)
    for count, drafted in ((2, 0), (3, TOPK)):
        for one in llm.generate(PROMPTS, replace(GREEDY, max_tokens=count)):
            assert one.spec.num_draft_tokens == drafted
