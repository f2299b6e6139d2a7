"""Texts of device rounds under stochastic rules are as likely as the target says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine.proof.check import chi_squared_p
from specengine.engine.proof.joint import LogitProbe, Text
from specengine.engine.proof.runs import MAX_MUTANT_P, MIN_P
from specengine.engine.round.draws import ChainDraws
from specengine.engine.round.executor import RoundExecutor
from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from specengine.kernels.sample.sample_rows_ref import exp_below_
from tests.halves import slow_but
from tests.support.device_rounds import run_on_device
from tests.support.hybrid import Folders, Sources, hybrid, trees
from tests.support.judged_rounds import RULES
from tests.support.rounds import ON_CPU, make

PROMPT, LENGTH, CHOICES, REQUESTS = "The quick brown fox", 4, 3, 400
HOT = SamplingParams(max_tokens=LENGTH + 3, temperature=4.0, top_k=CHOICES, ignore_eos=True)
SLOW = pytest.mark.slow
Expected = tuple[dict[Text, float], list[int]]  # of texts, and the prompt before them


def joint(plain: LLM, prompt: list[int]) -> dict[Text, float]:
    """The probability of each text of LENGTH tokens."""
    probe = LogitProbe(plain.engine)
    found: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        best = probe.logits([prompt + list(text) for text in found]).topk(CHOICES)
        weights = exp_below_((best.values - best.values[:, :1]) / HOT.temperature)
        shares = (weights.double() / weights.double().sum(-1, keepdim=True)).tolist()
        found = {
            (*text, token): mass * share
            for (text, mass), row, tokens in zip(
                found.items(), shares, best.indices.tolist(), strict=True
            )
            for token, share in zip(tokens, row, strict=True)
        }
    assert len(found) == CHOICES**LENGTH
    return found


@pytest.fixture(scope="module")
def plain(folders: Folders) -> LLM:
    return make(folders["EAGLE3"][0], None)


@pytest.fixture(scope="module")
def usual(plain: LLM) -> Expected:
    prompt = plain.tokenizer.encode(PROMPT)
    return joint(plain, prompt), prompt


@pytest.fixture(scope="module")
def repeating(plain: LLM) -> Expected:
    prompt = repeating_prompt(plain)
    return joint(plain, prompt), prompt


def repeating_prompt(plain: LLM) -> list[int]:
    """A prompt of which lookup drafts what may be emitted next."""
    params = [replace(HOT, seed=1000 + seed) for seed in range(4)]
    outputs = plain.generate([PROMPT] * 4, params)
    start = plain.tokenizer.encode(PROMPT)
    return [*(token for one in outputs for token in [*start, *one.token_ids]), *start]


def p_value(llm: LLM, expected: dict[Text, float], prompt: list[int]) -> float:
    """0 where a text is emitted that has no probability."""
    params = [replace(HOT, seed=seed) for seed in range(REQUESTS)]
    outputs = llm.generate([prompt] * REQUESTS, params)
    seen = Counter(tuple(one.token_ids[:LENGTH]) for one in outputs)
    if not set(seen) <= set(expected):
        return 0.0
    observed = torch.tensor([float(seen[text]) for text in expected])
    masses = torch.tensor(list(expected.values()), dtype=torch.float64)
    return chi_squared_p(observed, masses * REQUESTS)


def device_rounds(folders: Folders, spec: SpecConfig) -> tuple[LLM, RoundExecutor]:
    """All requests but the first find their prompt in the cache."""
    given = {"max_running_requests": 64, "max_total_tokens": 16384}
    llm = make(folders["EAGLE3"][0], spec, **given)
    return llm, run_on_device(llm, sizes=(1, 2, 64))


def tree_spec(folders: Folders, rule: str) -> SpecConfig:
    spec = folders["EAGLE3"][1]
    return replace(spec, eagle_topk=3, num_steps=3, num_draft_tokens=10, **RULES[rule])


@ON_CPU
@pytest.mark.parametrize(
    "rule",
    slow_but(
        ["sibling"],
        ["sibling", "target_only", "target_only, best drafts"],
    ),
)
def test_texts_of_trees_are_as_likely_as_the_target_says(
    rule: str, folders: Folders, usual: Expected
) -> None:
    llm, rounds = device_rounds(folders, tree_spec(folders, rule))
    assert p_value(llm, *usual) > MIN_P
    assert rounds.counters["replays"] > 20
    assert all(key.sampling.stochastic for key in rounds.captured)
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > REQUESTS


@ON_CPU
@pytest.mark.parametrize("rule", slow_but(["sibling"], ["target_only, best drafts", "sibling"]))
def test_rule_that_accepts_too_much_is_caught(
    rule: str, folders: Folders, usual: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every third request, a root's first child stands where all have been rejected."""
    llm, rounds = device_rounds(folders, tree_spec(folders, rule))
    verifier = llm.engine.parts.verifier
    decide = verifier.decide

    def too_kind(drafts: SampledRound, draws: Draws) -> Accepted:
        found = decide(drafts, draws)
        below_BN = drafts.children(torch.zeros_like(found.ends_B))
        helps_B = (found.ends_B == 0) & below_BN.any(1) & (draws.seeds_B % 3 == 0)
        return replace(found, ends_B=below_BN.int().argmax(1).where(helps_B, found.ends_B))

    monkeypatch.setattr(verifier, "decide", too_kind)
    assert p_value(llm, *usual) < MAX_MUTANT_P
    assert rounds.counters["replays"] > 20


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "branches"),
    [
        ("block", False),
        pytest.param("rejection", False, marks=SLOW),
        pytest.param("target_only, best drafts", False, marks=SLOW),
        pytest.param("sibling", True, marks=SLOW),
        pytest.param("target_only", True, marks=SLOW),
    ],
)
def test_texts_of_a_model_beside_lookup_are_as_likely_as_the_target_says(
    rule: str,
    branches: bool,
    folders: Folders,
    repeating: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (_, spec), given = folders["EAGLE3"], RULES[rule]
    spec = trees(spec, "both", **given) if branches else hybrid(spec, 4, **given)
    (llm, rounds), sources = device_rounds(folders, spec), Sources()
    sources.watch(rounds, monkeypatch)
    assert p_value(llm, *repeating) > MIN_P
    assert all(key.sampling.stochastic for key in sources.keys)
    assert sources.rounds["both"] > 10
    assert sources.accepted["text"] > REQUESTS / 20


@ON_CPU
def test_lookups_drafts_judged_by_the_models_weights_are_caught(
    folders: Folders, repeating: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    def override(self: ChainDraws, tokens_BK: Tensor, are_B: Tensor) -> None:
        """Weights are those of drafts that are not there."""

    monkeypatch.setattr(ChainDraws, "override", override)
    llm, _ = device_rounds(folders, hybrid(folders["EAGLE3"][1], 4, **RULES["block"]))
    assert p_value(llm, *repeating) < MAX_MUTANT_P
