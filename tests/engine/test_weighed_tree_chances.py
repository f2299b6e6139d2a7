"""What rounds of weighed trees say on the device is as likely as the target says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine.graph_weighed_tree import GraphWeighedTreeRound
from specengine.engine.proof.check import chi_squared_p
from specengine.engine.proof.joint import LogitProbe, Text
from specengine.engine.proof.runs import MAX_MUTANT_P, MIN_P
from specengine.kernels.accept_sampled import Accepted, Draws, SampledRound
from specengine.kernels.sample_rows_ref import exp_below_
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_round import make
from tests.engine.test_graph_weighed import ON_CPU
from tests.engine.test_graph_weighed_tree import RULES, with_rule

PROMPT, LENGTH, CHOICES, REQUESTS = "The quick brown fox", 4, 3, 600
HOT = SamplingParams(max_tokens=LENGTH + 3, temperature=4.0, top_k=CHOICES, ignore_eos=True)


def joint(plain: LLM, prompt: list[int] | None = None) -> dict[Text, float]:
    """The probability of each text of LENGTH tokens."""
    probe, prompt = LogitProbe(plain.engine), prompt or plain.tokenizer.encode(PROMPT)
    found: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        logits_RV = probe.logits([prompt + list(text) for text in found])
        best = logits_RV.topk(CHOICES)
        weights = exp_below_((best.values - best.values[:, :1]) / HOT.temperature)
        shares = (weights.double() / weights.double().sum(-1, keepdim=True)).tolist()
        found = {
            (*text, token): mass * share
            for (text, mass), row, tokens in zip(
                found.items(), shares, best.indices.tolist(), strict=True
            )
            for token, share in zip(tokens, row, strict=True)
        }
    return found


def flying(
    target: Path, drafters: dict[str, str], rule: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[LLM, GraphWeighedTreeRound]:
    spec = SpecConfig(
        algorithm="EAGLE3",
        draft_model_path=drafters["EAGLE3"],
        eagle_topk=3,
        num_steps=3,
        num_draft_tokens=10,
    )
    llm = make(target, with_rule(spec, rule), max_running_requests=64, disable_radix_cache=True)
    found = let_fly(llm, monkeypatch, most=64)
    assert isinstance(found, GraphWeighedTreeRound)
    return llm, found


def p_value(llm: LLM, expected: dict[Text, float], prompt: list[int] | str = PROMPT) -> float:
    """0 where a text is said that cannot be."""
    params = [replace(HOT, seed=seed) for seed in range(REQUESTS)]
    outputs = llm.generate([prompt] * REQUESTS, params)
    seen = Counter(tuple(one.token_ids[:LENGTH]) for one in outputs)
    if not set(seen) <= set(expected):
        return 0.0
    observed = torch.tensor([float(seen[text]) for text in expected])
    masses = torch.tensor(list(expected.values()), dtype=torch.float64)
    return chi_squared_p(observed, masses * REQUESTS)


@ON_CPU
@pytest.mark.parametrize("rule", RULES)
def test_texts_are_as_likely_as_the_target_says(
    rule: str, target: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = joint(make(target, None))
    assert len(expected) == CHOICES**LENGTH
    llm, graph_round = flying(target, drafters, rule, monkeypatch)
    assert p_value(llm, expected) > MIN_P
    assert graph_round.counters["replays"] > 20
    assert all(form.choosing.weighs for form in graph_round.captured)
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > REQUESTS


@ON_CPU
@pytest.mark.parametrize("rule", ["of the best", "sibling"])
def test_a_rule_that_is_too_kind_is_caught(
    rule: str, target: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every third request, a root's first child stands where all have been rejected."""
    judge = GraphWeighedTreeRound.judge

    def kind(self: GraphWeighedTreeRound, drafts: SampledRound, draws: Draws) -> Accepted:
        found = judge(self, drafts, draws)
        below_BN = drafts.children(torch.zeros_like(found.ends_B))
        helps_B = (found.ends_B == 0) & below_BN.any(1) & (draws.seeds_B % 3 == 0)
        return replace(found, ends_B=below_BN.int().argmax(1).where(helps_B, found.ends_B))

    expected = joint(make(target, None))
    monkeypatch.setattr(GraphWeighedTreeRound, "judge", kind)
    llm, _ = flying(target, drafters, rule, monkeypatch)
    assert p_value(llm, expected) < MAX_MUTANT_P
