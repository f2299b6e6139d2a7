"""Requests that limit their drafts fly among those that do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.core.sampling import SpecControl
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_round import GREEDY, PROMPTS, SAMPLED, make

PARAMS = [
    GREEDY,
    replace(GREEDY, speculative=SpecControl(enabled=False)),
    replace(SAMPLED[0], speculative=SpecControl(num_steps=1)),
]
LIMITS = [3, 0, 1]


@pytest.fixture(scope="module")
def specs(drafters: dict[str, str]) -> dict[str, SpecConfig]:
    return {
        "EAGLE3": SpecConfig(
            algorithm="EAGLE3", adaptive=False, draft_model_path=drafters["EAGLE3"], num_steps=3
        ),
        "NGRAM": SpecConfig(
            algorithm="NGRAM", adaptive=False, ngram_min_match=1, num_draft_tokens=4
        ),
    }


def check(target: Path, llm: LLM, spec: SpecConfig) -> None:
    eager = make(target, spec, disable_cuda_graph=True)
    for order in ([0, 1, 2], [1, 2, 0], [1]):  # rows change their owners
        prompts, params = [PROMPTS[i] for i in order], [PARAMS[i] for i in order]
        found, expected = llm.generate(prompts, params), eager.generate(prompts, params)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        for i, one, other in zip(order, found, expected, strict=True):
            assert len(one.spec.histogram) <= LIMITS[i] + 1
            if not LIMITS[i]:
                assert (one.spec.num_draft_tokens, one.spec.num_accepted) == (0, 0)
            if spec.algorithm == "EAGLE3":  # padding of short texts is a draft, too
                assert one.spec.histogram == other.spec.histogram


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are tested where there is a GPU")
@pytest.mark.parametrize("name", ["EAGLE3", "NGRAM"])
def test_limits_are_kept(
    name: str, target: Path, specs: dict[str, SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target, specs[name])
    flying = let_fly(llm, monkeypatch)
    check(target, llm, specs[name])
    assert flying.counters.keys() == {"captures", "replays"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["EAGLE3", "NGRAM"])
def test_limits_are_kept_on_the_gpu(name: str, target: Path, specs: dict[str, SpecConfig]) -> None:
    llm = make(target, specs[name])
    check(target, llm, specs[name])
    stats = llm.engine.stats().graphs["round"]
    assert stats.replays > 5
    assert not stats.fallbacks
