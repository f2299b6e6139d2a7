"""How much KV memory an engine is built with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specengine.core.config import EngineConfig, MemoryConfig, ModelConfig, SpecConfig
from specengine.core.registry import VERIFIERS
from specengine.engine.build import build_engine
from specengine.engine.forward_graphs_build import _kept_weights
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.simulated import SimulatedVerifier


def test_memory_that_is_no_whole_number_of_pages(small_models: dict[str, Path]) -> None:
    """Its last slots are left over; that is no lack of memory."""
    config = EngineConfig(
        model=ModelConfig(model=str(small_models["llama"])),
        memory=MemoryConfig(page_size=16, max_total_tokens=500),
    )
    assert build_engine(config).stats().num_slots == 496


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({}, 0),
        ({"verify": "match"}, 0),
        ({"verify": "relaxed"}, 1),
        ({"draft_sampling": True}, 1),
        ({"verify": "relaxed", "draft_sampling": True}, 2),
    ],
    ids=str,
)
def test_rounds_that_weigh_hold_rows_of_the_vocabulary(more: dict[str, Any], rows: int) -> None:
    """Beside the logits: what was drawn from, and what relaxed drafts are held against."""
    spec = SpecConfig(algorithm="EAGLE3", num_steps=3, num_draft_tokens=4, eagle_topk=1, **more)
    assert _kept_weights(spec) == rows


class Undeclared(MatchVerifier):
    """Decides otherwise, and does not say what it needs."""

    walks = SimulatedVerifier.walks


class Declared(Undeclared):
    keeps_logits = False
    walks = MatchVerifier.walks


@pytest.mark.parametrize(("rule", "rows"), [(Undeclared, 1), (Declared, 0)])
def test_rule_that_declares_nothing_is_given_memory_for_logits(
    rule: type[MatchVerifier], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any name, and where auto chooses it."""
    spec = SpecConfig(algorithm="EAGLE3", num_steps=3, num_draft_tokens=4, eagle_topk=1)
    monkeypatch.setitem(VERIFIERS, "match", f"{__name__}:{rule.__name__}")
    assert _kept_weights(spec) == rows
    monkeypatch.setitem(VERIFIERS, "target_only", f"{__name__}:{rule.__name__}")
    assert _kept_weights(replace(spec, verify="target_only")) == rows
