"""SUFFIX and the hybrid change no token, and really speculate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from tests.halves import each_value

NEW_TOKENS = 28
TEMPERATURES = {"llama": 0.0, "qwen3": 0.3}
PROMPTS = [
    "abcabcabcabcabc",
    "The quick brown fox",
    "x",
    "to be or not to be, that is the question: to be or not to be, that is " * 2,
    "0123456789" * 9,
]
CHAIN = SpecConfig(algorithm="SUFFIX", adaptive=False, num_draft_tokens=6)
TREE = SpecConfig(
    algorithm="SUFFIX", adaptive=False, num_draft_tokens=10, suffix_branches=3, suffix_factor=4.0
)
SHARED = SpecConfig(
    algorithm="SUFFIX",
    adaptive=False,
    suffix_shared_corpus=True,
    suffix_corpus_tokens=100,
    suffix_max_depth=8,
)
HYBRID = SpecConfig(
    algorithm="NGRAM",
    adaptive=False,
    ngram_min_match=1,
    hybrid_suffix=True,
    hybrid_suffix_min_match=3,
)
SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {"spec": CHAIN},
    "chain, pages of 16, chunks": {"spec": CHAIN, "page_size": 16, "chunked_prefill_size": 16},
    "tree": {"spec": TREE},
    "tree, pages of 16": {"spec": TREE, "page_size": 16},
    "shared corpus": {"spec": SHARED, "max_running_requests": 2},
    "hybrid": {"spec": HYBRID},
}


def make(folder: Path, **flags: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "max_total_tokens": 4096, **flags})


def run(llm: LLM, temperature: float) -> list[list[int]]:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, seed=5, ignore_eos=True)
    return [one.token_ids for one in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain(small_models: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Output without speculation, by family."""
    return {
        family: run(make(small_models[family]), temperature)
        for family, temperature in TEMPERATURES.items()
    }


@pytest.mark.parametrize(("setting", "family"), each_value(1, SETTINGS, TEMPERATURES))
def test_output_equals_plain_decoding(
    setting: str,
    family: str,
    small_models: dict[str, Path],
    plain: dict[str, list[list[int]]],
) -> None:
    llm = make(small_models[family], **SETTINGS[setting])
    for _ in range(2):  # the second time on prefix hits, and after outputs that the corpus keeps
        assert run(llm, TEMPERATURES[family]) == plain[family]
    llm.engine.scheduler.check_invariant()
    assert llm.engine.stats().spec.num_accepted_tokens > 0


EIGHT = [f"{i}{i}{i}" for i in range(8)]


def greedy(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    return [one.token_ids for one in llm.generate(EIGHT, params)]


@pytest.fixture(scope="module")
def eight(small_models: dict[str, Path]) -> list[list[int]]:
    return greedy(make(small_models["qwen3"]))


@pytest.mark.parametrize("spec", [CHAIN, TREE, HYBRID], ids=["chain", "tree", "hybrid"])
def test_retraction_changes_nothing(
    spec: SpecConfig, small_models: dict[str, Path], eight: list[list[int]]
) -> None:
    tight = make(small_models["qwen3"], spec=spec, max_total_tokens=144)
    tight.engine.scheduler.admission.demand.share = 0.0
    assert greedy(tight) == eight
    assert tight.engine.scheduler.num_retractions > 0
    tight.engine.scheduler.check_invariant()


def test_a_known_answer_is_copied(small_models: dict[str, Path]) -> None:
    """What was answered before is drafted whole from the shared corpus."""
    spec = SpecConfig(
        algorithm="SUFFIX", adaptive=False, suffix_shared_corpus=True, num_draft_tokens=8
    )
    llm = make(small_models["llama"], spec=spec)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=3, ignore_eos=True)
    first = llm.generate(["x"], params)[0]
    again = llm.generate(["x"], params)[0]
    assert again.token_ids == first.token_ids
    assert again.spec.mean_acceptance_length > first.spec.mean_acceptance_length + 2
    assert 1 + again.spec.num_rounds + again.spec.num_accepted == NEW_TOKENS
