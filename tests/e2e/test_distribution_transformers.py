"""Each stochastic verifier, on drafts of a trained model, keeps the distribution that transformers'
own model and the filters written here give. Nothing of the engine's sampler takes part in what is
expected."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig

TINY = Path(__file__).parents[2] / "target" / "zoo" / "tiny"
PROMPT = "The cat sat on the"
TEMPERATURE, TOP_K, TOP_P, MIN_P = 1.3, 8, 0.97, 0.03
SAMPLES = 5000
FIRST, COUNT = 1, 3  # the tokens that are looked at: the first one comes from the prefill
CELLS = 4  # for each of these tokens, CELLS ** COUNT in all
CHAIN: dict[str, Any] = {"num_steps": 3, "draft_sampling": True}
TREE: dict[str, Any] = {"num_steps": 2, "eagle_topk": 3, "num_draft_tokens": 7}
_known: dict[tuple[int, ...], Tensor] = {}  # probabilities by text: rules share most texts
CASES: list[tuple[str, dict[str, Any]]] = [
    ("rejection", CHAIN),
    ("block", CHAIN),
    ("target_only", TREE),
    ("sibling", TREE | {"draft_sampling": True}),
]


def filtered(logits_RV: Tensor) -> Tensor:
    """float64 [R, V]: the probabilities after temperature, top-k, top-p and min-p, in this order.
    top-p keeps the best tokens up to the one that reaches it; min-p counts from the best token."""
    probs_RV = (logits_RV.double() / TEMPERATURE).softmax(-1)
    sorted_RV, order_RV = probs_RV.sort(-1, descending=True)
    sorted_RV[:, TOP_K:] = 0
    sorted_RV /= sorted_RV.sum(-1, keepdim=True)
    sorted_RV[sorted_RV.cumsum(-1) - sorted_RV >= TOP_P] = 0
    sorted_RV[sorted_RV < MIN_P * sorted_RV[:, :1]] = 0
    sorted_RV /= sorted_RV.sum(-1, keepdim=True)
    return torch.zeros_like(probs_RV).scatter_(1, order_RV, sorted_RV)


def next_probs(prompt: list[int], texts_SL: Tensor) -> Tensor:
    """float64 [S, COUNT, V]: of the tokens from place FIRST on, given those before them."""
    unique_UL, where_S = texts_SL[:, : FIRST + COUNT - 1].unique(dim=0, return_inverse=True)
    texts = [tuple(text) for text in unique_UL.tolist()]
    new = torch.tensor([text for text in texts if text not in _known])
    for part_RL in new.split(256) if len(new) else ():
        rows_RT = torch.cat([torch.tensor(prompt).expand(len(part_RL), -1), part_RL], dim=1)
        with torch.inference_mode():
            logits_RCV = reference_model()(rows_RT).logits[:, -COUNT:]
        probs_RCV = filtered(logits_RCV.flatten(0, 1)).view(len(part_RL), COUNT, -1)
        _known.update(zip(map(tuple, part_RL.tolist()), probs_RCV, strict=True))
    return torch.stack([_known[text] for text in texts])[where_S]


@cache
def reference_model() -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(TINY).float().eval()


def uniforms(probs_SCV: Tensor, tokens_SC: Tensor) -> Tensor:
    """float64 [S, COUNT]: the randomised probability integral transform (Brockwell 2007), tokens
    ordered from the likeliest on. Independent and uniform where the tokens follow the
    probabilities."""
    own_SC1 = probs_SCV.gather(2, tokens_SC[:, :, None])
    assert bool((own_SC1 > 0).all()), "a token that the filters remove was sampled"
    above_SC = (probs_SCV * (probs_SCV > own_SC1)).sum(-1)
    ids_V = torch.arange(probs_SCV.shape[2])
    tied_SCV = (probs_SCV == own_SC1) & (ids_V < tokens_SC[:, :, None])
    below_SC = above_SC + (probs_SCV * tied_SCV).sum(-1)
    share_SC = torch.rand(tokens_SC.shape, generator=torch.Generator().manual_seed(0)).double()
    return below_SC + share_SC * own_SC1[:, :, 0]


def p_value(texts_SL: Tensor, prompt: list[int]) -> float:
    """χ² of the joint of COUNT tokens, in cells of equal chance that do not depend on the data."""
    probs_SCV = next_probs(prompt, texts_SL)
    uniforms_SC = uniforms(probs_SCV, texts_SL[:, FIRST : FIRST + COUNT])
    cells_SC = (uniforms_SC * CELLS).long().clamp(max=CELLS - 1)
    place_S = (cells_SC * CELLS ** torch.arange(COUNT)).sum(-1)
    counts = torch.bincount(place_S, minlength=CELLS**COUNT)
    return float(chisquare(counts.numpy()).pvalue)


def make(verify: str, shape: dict[str, Any]) -> LLM:
    spec = SpecConfig(algorithm="EAGLE3", adaptive=False, verify=verify, **shape)
    flags = {"max_running_requests": 256, "max_total_tokens": 16384}
    return LLM("tiny", spec, dtype="float32", max_queued_requests=SAMPLES, **flags)


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


@pytest.mark.parametrize(("verify", "shape"), CASES, ids=[name for name, _ in CASES])
def test_samples_follow_the_filtered_target(verify: str, shape: dict[str, Any]) -> None:
    llm = make(verify, shape)
    prompt = llm.tokenizer(PROMPT)["input_ids"]
    assert p_value(draw(llm, prompt), prompt) > 1e-3
    totals = llm.engine.stats().spec
    assert 0.5 * SAMPLES < totals.num_accepted_tokens < 0.9 * totals.num_draft_tokens
