"""Which rounds weigh drafts on the device, and why others do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import SpecConfig
from specengine.draft.standalone.worker import StandaloneWorker
from specengine.engine.graph_build import _row_drafter, make_graph_round, new_round
from specengine.engine.graph_relaxed import (
    GraphRelaxedRound,
    GraphRelaxedTreeRound,
    RelaxedRounds,
)
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_tree import GraphTreeRound
from specengine.engine.graph_weighed import GraphWeighedRound, WeighingRound
from specengine.engine.graph_weighed_tree import GraphWeighedTreeRound
from specengine.target.verify.sibling import SiblingVerifier
from tests.engine.test_graph_round import make
from tests.engine.test_no_graphs import with_graphs
from tests.support.device_lengths import DeviceLengths


@pytest.mark.parametrize(
    ("name", "given", "drawn", "expected"),
    [
        (
            "EAGLE3",
            {"verify": "match"},
            True,
            "drafts are sampled, and the verifier does not weigh",
        ),
        ("EAGLE3", {"simulate_accept_length": 2.5}, True, "drafts are sampled, and the verifier"),
        ("EAGLE3", {"eagle_topk": 2}, True, GraphWeighedTreeRound),
        ("EAGLE3", {"eagle_topk": 2, "verify": "match"}, True, "drafts are sampled, and"),
        ("EAGLE3", {}, False, GraphRound),
        ("EAGLE3", {"simulate_accept_length": 2.5}, False, GraphRound),
        ("EAGLE3", {"verify": "target_only"}, False, GraphWeighedRound),
        ("EAGLE3", {"verify": "target_only", "eagle_topk": 2}, False, GraphWeighedTreeRound),
        ("EAGLE3", {"eagle_topk": 2}, False, GraphTreeRound),
        ("EAGLE3", {"eagle_topk": 2, "simulate_accept_length": 2.5}, False, GraphTreeRound),
        ("EAGLE3", {}, True, GraphWeighedRound),
        ("STANDALONE", {"verify": "sibling"}, True, GraphWeighedRound),
        ("STANDALONE", {"eagle_topk": 2}, False, GraphTreeRound),
        ("STANDALONE", {"eagle_topk": 2, "verify": "target_only"}, False, GraphWeighedTreeRound),
        ("STANDALONE", {"eagle_topk": 2, "verify": "sibling"}, True, GraphWeighedTreeRound),
        ("STANDALONE", {"eagle_topk": 2, "verify": "match"}, True, "drafts are sampled, and"),
        ("NGRAM", {"verify": "target_only"}, False, GraphWeighedRound),
        ("SUFFIX", {"verify": "target_only"}, False, GraphWeighedRound),
        ("NGRAM", {"verify": "target_only", "ngram_branches": 2}, False, GraphWeighedTreeRound),
        ("SUFFIX", {"verify": "target_only", "suffix_branches": 2}, False, GraphWeighedTreeRound),
        ("NGRAM", {}, False, GraphRound),
        ("EAGLE3", {"verify": "relaxed"}, False, GraphRelaxedRound),
        ("EAGLE3", {"verify": "relaxed"}, True, GraphRelaxedRound),
        ("EAGLE3", {"verify": "relaxed", "eagle_topk": 2}, False, GraphRelaxedTreeRound),
        ("STANDALONE", {"verify": "relaxed", "eagle_topk": 2}, True, GraphRelaxedTreeRound),
        ("NGRAM", {"verify": "relaxed"}, False, GraphRelaxedRound),
        ("SUFFIX", {"verify": "relaxed", "suffix_branches": 2}, False, GraphRelaxedTreeRound),
        ("EAGLE3", {"verify": "relaxed", "simulate_accept_length": 2.5}, False, GraphRound),
    ],
)
def test_who_is_weighed(
    name: str,
    given: dict[str, Any],
    drawn: bool,
    expected: str | type[GraphRound],
    target: Path,
    drafters: dict[str, str],
) -> None:
    shape: dict[str, Any] = {"num_draft_tokens": 4}
    if name in drafters:
        shape = {"draft_model_path": drafters[name], "num_steps": 3}
    llm = make(
        target, SpecConfig(algorithm=name, draft_sampling=drawn, **shape, **given), device="cpu"
    )
    if isinstance(llm.engine.drafter, StandaloneWorker):
        llm.engine.drafter.flies = True
    engine, config = llm.engine, with_graphs(llm)
    for runner in (engine.parts.worker.runner, *getattr(engine.drafter, "runners", ())):
        runner.attn_backend = DeviceLengths(torch.device("cpu"))
    made = make_graph_round(config, engine.parts)
    if isinstance(expected, str):
        assert isinstance(made, str)
        assert made.startswith(expected)
        return
    assert type(made) is expected
    assert made.choices.weighs == issubclass(expected, WeighingRound)
    assert made.choices.weighs_greedy == issubclass(expected, RelaxedRounds)
    may_sample = given.get("verify") != "target_only" or made.choices.weighs
    assert made.samples == may_sample
    assert (made.simulated is None) == ("simulate_accept_length" not in given)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("NGRAM", {}, GraphRound),
        ("NGRAM", {"ngram_branches": 2}, GraphTreeRound),
        ("EAGLE3", {}, GraphRound),
        ("EAGLE3", {"eagle_topk": 2}, GraphTreeRound),
    ],
)
def test_what_cannot_be_weighed_is_matched(
    name: str,
    given: dict[str, Any],
    expected: type[GraphRound],
    target: Path,
    drafters: dict[str, str],
) -> None:
    """On the host, too. No configuration asks for it."""
    given = {"num_draft_tokens": 4, "adaptive": False} | given
    if name in drafters:
        given |= {"draft_model_path": drafters[name], "num_steps": 3}
    llm = make(target, SpecConfig(algorithm=name, **given), device="cpu")
    parts = replace(llm.engine.parts, verifier=SiblingVerifier())
    found = _row_drafter(parts.drafter, 2, torch.device("cpu"), chooses=False)
    assert found is not None
    made = new_round(parts, *found, [1, 2])
    assert type(made) is expected
    assert made.samples
    assert not made.choices.weighs
