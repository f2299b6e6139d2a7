"""A grammar over sampled drafts: the output keeps the target's distribution under the mask, though
the draft model knows nothing of the grammar."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig
from specengine.engine.grammar import drafts
from tests.e2e.test_distribution import (
    LENGTH,
    LETTERS,
    PROMPT,
    Joint,
    biased,
    make,
    target,
)
from tests.support.chi_squared import chisquare

pytestmark = pytest.mark.slow

__all__ = ["target"]  # the fixture

SAMPLES = 900
SENTENCES = [a + b for a in ("ab", "ba", "ca", "cc") for b in ("ab", "ba", "ca", "cc")]
GRAMMAR = GrammarSpec.regex("(ab|[bc]a|cc){2}")
CHAIN: dict[str, Any] = {"num_steps": 3}
TREE: dict[str, Any] = {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 9}


def spec_of(draft: Path, shape: dict[str, Any], verify: str) -> SpecConfig:
    return SpecConfig(
        algorithm="STANDALONE",
        adaptive=False,
        draft_model_path=str(draft),
        draft_sampling=True,
        verify=verify,
        **shape,
    )


def masked(llm: LLM, joint: Joint) -> Joint:
    """The joint distribution of the sentences: at each place, the target over the letters that lead
    to one of them."""
    tokens = {letter: llm.tokenizer(letter)["input_ids"][0] for letter in LETTERS}

    def mass(text: str) -> float:
        start = tuple(tokens[letter] for letter in text)
        return sum(share for path, share in joint.items() if path[: len(start)] == start)

    result: Joint = {}
    for sentence in SENTENCES:
        share = 1.0
        for place in range(LENGTH):
            legal = {other[: place + 1] for other in SENTENCES if other[:place] == sentence[:place]}
            share *= mass(sentence[: place + 1]) / sum(mass(text) for text in legal)
        result[tuple(tokens[letter] for letter in sentence)] = share
    return result


def draw(llm: LLM) -> Counter[tuple[int, ...]]:
    bias = biased(llm.tokenizer)
    params = [
        SamplingParams(max_tokens=LENGTH, seed=seed, logit_bias=bias, grammar=GRAMMAR)
        for seed in range(SAMPLES)
    ]
    results = llm.generate([PROMPT] * SAMPLES, params, progress=False)
    return Counter(tuple(one.token_ids) for one in results)


def p_value(counts: Counter[tuple[int, ...]], joint: Joint) -> float:
    assert set(counts) <= set(joint)
    observed = [counts[text] for text in joint]
    expected = [share * SAMPLES for share in joint.values()]
    assert min(expected) > 5
    return float(chisquare(observed, expected, sum_check=False).pvalue)


@pytest.mark.parametrize(
    ("shape", "verify"), [(CHAIN, "rejection"), (CHAIN, "block"), (TREE, "sibling")]
)
def test_sampled_drafts_leave_the_masked_distribution(
    shape: dict[str, Any],
    verify: str,
    target: tuple[Path, Joint],
    small_models: dict[str, Path],
) -> None:
    folder, joint = target
    llm = make(folder, spec_of(small_models["llama"], shape, verify))
    expected = masked(llm, joint)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert p_value(draw(llm), expected) > 1e-3
    totals = llm.engine.stats().spec
    assert SAMPLES / 10 < totals.num_accepted_tokens < totals.num_draft_tokens


def test_cutting_what_was_sampled_would_be_caught(
    target: tuple[Path, Joint], small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: the verifier does not see the draft that the grammar forbids."""
    kept = drafts._kept
    monkeypatch.setattr(drafts, "_kept", lambda state, tree, keeps: kept(state, tree, False))
    folder, joint = target
    llm = make(folder, spec_of(small_models["llama"], CHAIN, "rejection"))
    assert p_value(draw(llm), masked(llm, joint)) < 1e-6
