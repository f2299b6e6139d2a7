"""Each stochastic verifier, on drafts of a trained model, keeps the distribution that transformers'
own model and the filters written here give. Nothing of the engine's sampler takes part in what is
expected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from tests.support.chi_squared import chi_squared_tail, chisquare

TINY = Path(__file__).parents[2] / "target" / "zoo" / "tiny"
PROMPT = "The cat sat on the"
# So hot that many drafts are rejected, which is where rules err; each filter removes tokens.
TEMPERATURE, TOP_K, TOP_P, MIN_P = 3.0, 8, 0.9, 0.1
SAMPLES = 600
# The tokens that are looked at: the first one comes from the prefill, and later ones show less of a
# mistake, as drafts are better there.
FIRST, COUNT = 1, 3
CELLS = 4  # for each of these tokens, CELLS ** COUNT in all
ALONE = 8  # cells of each by itself
CHAIN: dict[str, Any] = {"num_steps": 3, "draft_sampling": True}
TREE: dict[str, Any] = {"num_steps": 2, "eagle_topk": 3, "num_draft_tokens": 7}
# A rule and its drafts. Rejections that leave the target as it is have p-values of 7e-9, 1e-8,
# 7e-10 and 3e-15.
CASES: dict[str, dict[str, Any]] = {
    "rejection": CHAIN,
    "block": CHAIN,
    "target_only": TREE,
    "sibling": TREE | {"draft_sampling": True},
}


@dataclass(frozen=True)
class Best:
    """The TOP_K likeliest tokens of each row, all that may be sampled."""

    probs_RK: Tensor  # float64
    ids_RK: Tensor  # int64


def filtered(logits_RV: Tensor) -> Best:
    """The probabilities after temperature, top-k, top-p and min-p, in this order. top-p keeps the
    best tokens up to the one that reaches it; min-p counts from the best token."""
    best = logits_RV.double().topk(TOP_K)
    probs_RK = (best.values / TEMPERATURE).softmax(-1)
    probs_RK[probs_RK.cumsum(-1) - probs_RK >= TOP_P] = 0
    probs_RK[probs_RK < MIN_P * probs_RK[:, :1]] = 0
    return Best(probs_RK / probs_RK.sum(-1, keepdim=True), best.indices)


def next_probs(prompt: list[int], texts_SL: Tensor) -> Best:
    """Probabilities of the tokens that are looked at, each given those before it: S * COUNT
    rows."""
    unique_UL, where_S = texts_SL[:, : FIRST + COUNT - 1].unique(dim=0, return_inverse=True)
    rows_UT = torch.cat([torch.tensor(prompt).expand(len(unique_UL), -1), unique_UL], dim=1)
    found = list[Best]()
    for part_RT in rows_UT.split(64):
        with torch.inference_mode():
            logits_RCV = reference_model()(part_RT, logits_to_keep=COUNT).logits
        found.append(filtered(logits_RCV.flatten(0, 1)))
    rows_R = (where_S[:, None] * COUNT + torch.arange(COUNT)).flatten()
    probs_RK = torch.cat([one.probs_RK for one in found])
    return Best(probs_RK[rows_R], torch.cat([one.ids_RK for one in found])[rows_R])


@cache
def reference_model() -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(TINY).float().eval()


def uniforms(best: Best, tokens_R: Tensor) -> Tensor:
    """float64 [R]: the randomised probability integral transform (Brockwell 2007), tokens ordered
    from the likeliest on. Independent and uniform where the tokens follow the probabilities."""
    probs_RK, is_own_RK = best.probs_RK, best.ids_RK == tokens_R[:, None]
    own_R1 = (probs_RK * is_own_RK).sum(-1, keepdim=True)
    assert bool((own_R1 > 0).all()), "a token that the filters remove was sampled"
    is_above_RK = (probs_RK > own_R1) | ((probs_RK == own_R1) & (best.ids_RK < tokens_R[:, None]))
    share_R = torch.rand(len(tokens_R), generator=torch.Generator().manual_seed(0)).double()
    return (probs_RK * is_above_RK).sum(-1) + share_R * own_R1[:, 0]


def p_value(texts_SL: Tensor, prompt: list[int]) -> float:
    """The least of two χ², in cells of equal chance that do not depend on the data: of the joint of
    COUNT tokens, and of each by itself, which shows a mistake in fewer samples."""
    tokens_R = texts_SL[:, FIRST : FIRST + COUNT].flatten()
    uniforms_SC = uniforms(next_probs(prompt, texts_SL), tokens_R).view(-1, COUNT)
    cells_SC = (uniforms_SC * CELLS).long().clamp(max=CELLS - 1)
    place_S = (cells_SC * CELLS ** torch.arange(COUNT)).sum(-1)
    joint = chisquare(place_S.bincount(minlength=CELLS**COUNT).numpy()).pvalue
    alone_SC = (uniforms_SC * ALONE).long().clamp(max=ALONE - 1)
    counts = [alone_S.bincount(minlength=ALONE).numpy() for alone_S in alone_SC.unbind(1)]
    total = sum(chisquare(one).statistic for one in counts)  # of independent tokens
    return min(joint, chi_squared_tail(total, COUNT * (ALONE - 1)))


def make(verify: str, shape: dict[str, Any]) -> LLM:
    spec = SpecConfig(algorithm="EAGLE3", adaptive=False, verify=verify, **shape)
    flags = {"max_running_requests": 256, "max_total_tokens": 16384}
    return LLM("tiny", spec, dtype="float32", max_queued_requests=4000, **flags)


def draw(llm: LLM, prompt: list[int]) -> Tensor:
    """int64 [SAMPLES, length]. Longer than what is looked at, so that drafts are not cut short."""
    params = [
        SamplingParams(
            max_tokens=FIRST + COUNT + 1,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            top_p=TOP_P,
            min_p=MIN_P,
            seed=seed,
            ignore_eos=True,
        )
        for seed in range(SAMPLES)
    ]
    results = llm.generate([prompt] * SAMPLES, params, progress=False)
    return torch.tensor([one.token_ids for one in results])


@pytest.mark.parametrize("verify", CASES)
def test_samples_follow_the_filtered_target(verify: str) -> None:
    llm = make(verify, CASES[verify])
    prompt = llm.tokenizer(PROMPT)["input_ids"]
    assert p_value(draw(llm, prompt), prompt) > 5e-4
    totals = llm.engine.stats().spec
    assert 0.5 * SAMPLES < totals.num_accepted_tokens < 0.9 * totals.num_draft_tokens
