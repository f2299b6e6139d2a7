"""Engines with graphs, but without those of rounds, drafts or prefills, report why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.draft.worker import DraftWorker
from specengine.engine import build
from specengine.engine.forward_graphs_build import add_draft_loops
from specengine.engine.phases import Phases
from specengine.runner import model_runner
from specengine.server.metrics import ServerMetrics
from tests.support.device_lengths import DeviceLengths
from tests.support.rounds import GREEDY, ON_CPU, PROMPTS, make, with_graphs

ON_HOST = "the attention backend plans on the host"
SPEC = SpecConfig(algorithm="EAGLE3", adaptive=False, num_steps=3)


def plan_on_host(llm: LLM) -> None:
    backend: Any = DeviceLengths(torch.device("cpu"))
    backend.limits = replace(backend.limits, plans_on_host=True)
    for runner in (llm.engine.parts.worker.runner, *cast(DraftWorker, llm.engine.drafter).runners):
        runner.attn_backend = backend


def without_device_rule(llm: LLM) -> None:
    cast(Any, llm.engine.parts.verifier).device_rule = None


def as_it_is(llm: LLM) -> None: ...


def count_calls(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one a call."""
    calls: list[None] = []
    method = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        calls.append(None)
        return method(*given, **named)

    monkeypatch.setattr(owner, name, call)
    return calls


@ON_CPU
@pytest.mark.parametrize(
    ("change", "given", "trace", "of_rounds", "of_drafts"),
    [
        (plan_on_host, {}, {}, ON_HOST, ON_HOST),
        (as_it_is, {}, {"trace": "a file"}, "rounds are traced", "rounds are traced"),
        (
            as_it_is,
            {"draft_sampling": True, "verify": "match"},
            {},
            "drafts are sampled, and the verifier does not weigh them",
            "the drafter needs the host in the middle of a draft",
        ),
        (
            as_it_is,
            {
                "draft_sampling": True,
                "verify": "match",
                "eagle_topk": 2,
                "num_draft_tokens": 6,
            },
            {},
            "drafts are sampled, and the verifier does not weigh them",
            "the drafter needs the host in the middle of a draft",
        ),
        (
            as_it_is,
            {
                "draft_sampling": True,
                "verify": "match",
                "hybrid_suffix": True,
                "num_draft_tokens": 6,
            },
            {},
            "drafts are sampled, and the verifier does not weigh them",
            None,
        ),
        (without_device_rule, {}, {}, "the verifier does more than compare tokens", None),
    ],
    ids=[
        "plans on the host",
        "traced",
        "sampled drafts",
        "sampled tree",
        "sampled drafts and lookup",
        "another verifier",
    ],
)
def test_every_round_without_a_graph_is_counted(
    change: Callable[[LLM], None],
    given: dict[str, Any],
    trace: dict[str, str],
    of_rounds: str,
    of_drafts: str | None,
    target: Path,
    drafters: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = make(target, None, device="cpu")
    path = drafters[given.get("algorithm", "EAGLE3")]
    spec = replace(SPEC, draft_model_path=path, **given)
    llm = make(target, spec, device="cpu")
    change(llm)
    engine, config = llm.engine, with_graphs(llm, **trace)
    with caplog.at_level(logging.INFO):
        if of_drafts is not None:
            engine.ragged_counters = dict(add_draft_loops(config, engine.drafter))
        build._capture(config, engine, engine.parts.worker.runner, Phases(), None)
    messages = [one.getMessage() for one in caplog.records]
    assert f"no round graphs: {of_rounds}" in messages
    assert (f"no draft loop graphs: {of_drafts}" in messages) == (of_drafts is not None)
    rounds = count_calls(engine.host_round, "run", monkeypatch)
    drafts = count_calls(getattr(engine.drafter, "inner", engine.drafter), "start", monkeypatch)
    found = [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]
    assert found == [one.token_ids for one in plain.generate(PROMPTS, GREEDY)]
    graphs, metrics = engine.stats().graphs, ServerMetrics(engine.stats).render().decode()
    expected = {"round": {of_rounds: len(rounds)}}
    if of_drafts is not None:
        expected["draft loop"] = {of_drafts: len(drafts)}
    assert {kind: one.fallbacks for kind, one in graphs.items()} == expected
    assert len(rounds) >= len(drafts) > 3
    for kind, reasons in expected.items():
        for reason, count in reasons.items():
            labels = f'{{graph="{kind}",model_name="target",reason="{reason}"}}'
            assert f"specengine:graph_fallbacks_total{labels} {float(count)}" in metrics


@ON_CPU
@pytest.mark.parametrize("name", ["plain", "NGRAM"])
def test_drafter_without_a_model_has_no_draft_loops(name: str, target: Path) -> None:
    spec = None if name == "plain" else SpecConfig(algorithm=name, adaptive=False)
    llm = make(target, spec, device="cpu")
    assert add_draft_loops(with_graphs(llm), llm.engine.drafter) == {}


@ON_CPU
@pytest.mark.parametrize(("padding", "reason"), [(True, ON_HOST), (False, "padding off")])
def test_every_prefill_without_a_graph_is_counted(
    padding: bool, reason: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps are not."""
    llm = make(target, None, device="cpu")
    runner = llm.engine.parts.worker.runner
    backend: Any = DeviceLengths(torch.device("cpu"))
    backend.limits = replace(backend.limits, plans_on_host=padding)
    runner.attn_backend = backend
    decode = SimpleNamespace(capture=lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "DecodeGraphs", lambda *_: decode)
        patch.setattr(runner, "platform", SimpleNamespace(has_graphs=True))
        runner.capture_graphs([1, 2], padding)
    runner.decode_graphs = None
    prefills = count_calls(llm.engine, "_prefill", monkeypatch)
    for prompt in PROMPTS:
        llm.generate([prompt], GREEDY)
    stats = llm.engine.stats().graphs["prefill"]
    assert stats.fallbacks == {reason: len(prefills)} == {reason: 3}
    assert stats.replays == 0
