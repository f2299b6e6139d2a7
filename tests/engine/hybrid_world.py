"""Models that draft beside suffix matches: what tests of their rounds share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.spec import VerifyResult
from specengine.draft.hybrid import HybridDrafter
from specengine.engine.graph_hybrid import GraphHybridRound
from specengine.engine.round_form import Flight, Form
from tests.engine.flying_world import let_fly

NAMES = ["EAGLE", "EAGLE3", "STANDALONE", "MTP", "MTP layers"]
STEPS = 3  # of the models
PASSAGE = "to be or not to be, that is the question: "
PROMPTS = [PASSAGE * 3, "The quick brown fox", "0123456789" * 4 + "x", "x"]
LONG = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)


def hybrid(spec: SpecConfig, most_nodes: int = 8, **options: Any) -> SpecConfig:
    """The spec's drafter beside suffixes. most_nodes: of their drafts, root included."""
    given = {"adaptive": False, "hybrid_suffix": True, "hybrid_suffix_min_match": 3}
    return replace(spec, **given | {"num_draft_tokens": most_nodes} | options)


def make(folder: Path, spec: SpecConfig | None, **flags: Any) -> LLM:
    given = {"dtype": "float32", "max_total_tokens": 2048, "disable_cuda_graph": True}
    return LLM(str(folder), spec, **given | flags)


@dataclass
class Sources:
    """Of rounds on the device that have landed."""

    forms: Counter[Form] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)  # by who drafted
    accepted: Counter[str] = field(default_factory=Counter)  # drafts, likewise

    def watch(self, flying: GraphHybridRound, monkeypatch: pytest.MonkeyPatch) -> None:
        land = flying.land

        def watched(flight: Flight) -> VerifyResult:
            marks = flight.of_text or [False] * len(flight.reqs)
            result, kind = land(flight), kind_of(flight.form)
            assert any(marks) <= (kind != "model")
            self.forms[flight.form] += 1
            self.rounds[kind] += 1
            for is_text, stood in zip(marks, result.num_accepted, strict=True):
                self.accepted["text" if is_text else "model"] += stood
            return result

        monkeypatch.setattr(flying, "land", watched)


def kind_of(form: Form) -> str:
    if form.model_steps == 0:
        return "text"
    return "model" if form.model_steps is None and form.num_steps <= STEPS else "both"


def fly(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, overlaps: bool = True, most: int = 4
) -> tuple[GraphHybridRound, Sources]:
    """Before any request."""
    drafter = llm.engine.drafter
    assert isinstance(drafter, HybridDrafter)
    if hasattr(drafter.inner, "flies"):
        drafter.inner.flies = True
    flying, sources = let_fly(llm, monkeypatch, overlaps, most), Sources()
    assert isinstance(flying, GraphHybridRound)
    sources.watch(flying, monkeypatch)
    return flying, sources
