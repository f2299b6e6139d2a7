"""Greedy output is token-identical to transformers, however the engine gets there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from tests.halves import each_value
from tests.support.families import FAMILIES, assert_greedy, reference_model

NEW_TOKENS = 32
PROMPTS = [
    "abcabcabcabcabc",
    "The quick brown fox",
    "x",
    "to be or not to be, that is the question: to be or not to be, that is " * 2,
    "0123456789" * 9,
    "The quick brown fox jumps over the lazy dog, and the quick brown fox",
]
CHAIN = SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=6, ngram_min_match=1)
TREE = SpecConfig(
    algorithm="NGRAM", adaptive=False, num_draft_tokens=10, ngram_branches=3, ngram_min_match=1
)
SUFFIX = SpecConfig(
    algorithm="SUFFIX", adaptive=False, num_draft_tokens=10, suffix_branches=3, suffix_factor=4.0
)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages of 16": {"page_size": 16},
    "chunks of 16": {"chunked_prefill_size": 16},
    "mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "no radix cache": {"disable_radix_cache": True},
    "chain": {"spec": CHAIN},
    "tree": {"spec": TREE},
    "tree, pages of 16": {"spec": TREE, "page_size": 16},
    "chain, chunks, shared corpus": {
        "spec": SpecConfig(
            algorithm="NGRAM", adaptive=False, ngram_shared_corpus=True, ngram_min_match=1
        ),
        "chunked_prefill_size": 16,
    },
    "suffixes": {"spec": SUFFIX},
    "hybrid": {"spec": replace(CHAIN, hybrid_suffix=True, hybrid_suffix_min_match=3)},
}

# Of families whose layers keep KV as Llama's do, the rest is for make test-all.
ALWAYS = {
    "llama": tuple(SETTINGS),
    "mistral": ("pages of 16", "mixed", "chain", "tree, pages of 16"),  # has a window
    "qwen2": ("plain", "mixed", "tree, pages of 16"),
    "qwen3": ("plain", "mixed", "tree, pages of 16"),
}
OTHERS = ("plain", "tree, pages of 16")
CASES = [
    pytest.param(
        family,
        setting,
        marks=() if setting in ALWAYS.get(family, OTHERS) else (pytest.mark.slow,),
    )
    for family in FAMILIES
    for setting in SETTINGS
]


def prompts_of(family: str) -> list[str]:
    """One is longer than any small model's window."""
    return PROMPTS if family in ALWAYS else PROMPTS[1:4]


def make(folder: Path, **flags: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "max_total_tokens": 4096, **flags})


def greedy(llm: LLM, prompts: list[str], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return [one.token_ids for one in llm.generate(prompts, params)]


class Reference:
    """Transformers' models by family."""

    def __init__(self, small_models: dict[str, Path]) -> None:
        self._small_models = small_models
        self._said: dict[tuple[str, ...], list[list[int]]] = {}

    def assert_says(self, family: str, outputs: list[list[int]], prompts: list[str]) -> None:
        """Outputs that were found to be transformers' are not asked again."""
        asked = (family, *prompts)
        if asked in self._said:
            assert outputs == self._said[asked]
            return
        import transformers

        folder = self._small_models[family]
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = reference_model(folder, family)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_greedy(model, tokenizer(prompt).input_ids, output)
            assert len(output) == NEW_TOKENS
        self._said[asked] = outputs


@pytest.fixture(scope="module")
def reference(small_models: dict[str, Path]) -> Reference:
    return Reference(small_models)


@pytest.mark.parametrize(("family", "setting"), CASES)
def test_batch_equals_transformers(
    family: str, setting: str, small_models: dict[str, Path], reference: Reference
) -> None:
    llm = make(small_models[family], **SETTINGS[setting])
    prompts = prompts_of(family)
    reference.assert_says(family, greedy(llm, prompts), prompts)
    llm.engine.scheduler.check_invariant()
    drafted = llm.engine.scheduler.spec_totals.num_draft_tokens
    assert (drafted > 0) == ("spec" in SETTINGS[setting])


@pytest.mark.parametrize("spec", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_alone_and_on_prefix_hits(
    spec: SpecConfig | None, small_models: dict[str, Path], reference: Reference
) -> None:
    llm = make(small_models["llama"], spec=spec)
    prompts = PROMPTS[1::2]  # of which the first begins the last
    alone = [greedy(llm, [prompt])[0] for prompt in prompts]
    reference.assert_says("llama", alone, prompts)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    again = llm.generate(prompts, params)
    assert [one.token_ids for one in again] == alone
    assert sum(one.num_cached_tokens for one in again) > 100


EIGHT = [f"{i}{i}{i}" for i in range(8)]


@pytest.fixture(scope="module")
def eight(small_models: dict[str, Path]) -> list[list[int]]:
    """What plain decoding with enough memory answers to EIGHT."""
    return greedy(make(small_models["qwen3"]), EIGHT, new_tokens=28)


@pytest.mark.parametrize(("spec", "page_size"), each_value(1, [None, CHAIN, TREE], [1, 16]))
def test_retraction_changes_nothing(
    spec: SpecConfig | None, page_size: int, small_models: dict[str, Path], eight: list[list[int]]
) -> None:
    """Eight requests are admitted on the hope that they end at once; they do not."""
    tight = make(small_models["qwen3"], spec=spec, page_size=page_size, max_total_tokens=144)
    tight.engine.scheduler.admission.demand.share = 0.0
    assert greedy(tight, EIGHT, new_tokens=28) == eight
    assert tight.engine.scheduler.num_retractions > 0
    tight.engine.scheduler.check_invariant()


def test_ngram_really_speculates(small_models: dict[str, Path]) -> None:
    llm = make(small_models["llama"], spec=CHAIN)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    spec = llm.generate([PROMPTS[0]], params)[0].spec
    assert spec.num_accepted > 0
    assert 1 + spec.num_rounds + spec.num_accepted == NEW_TOKENS
    assert sum(count * k for k, count in enumerate(spec.histogram)) == spec.num_accepted


@pytest.fixture(scope="module")
def seeded(small_models: dict[str, Path]) -> list[int]:
    return make(small_models["qwen2"]).generate([PROMPTS[0]], SEEDED)[0].token_ids


SEEDED = SamplingParams(max_tokens=16, temperature=1.0, seed=7, ignore_eos=True)


@pytest.mark.parametrize("spec", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_a_seed_fixes_the_sampled_output(
    spec: SpecConfig | None, small_models: dict[str, Path], seeded: list[int]
) -> None:
    """Whatever else is in the batch, and with speculation on or off."""
    other = SamplingParams(max_tokens=16, temperature=1.3, seed=8, ignore_eos=True)
    llm = make(small_models["qwen2"], spec=spec)
    mixed = llm.generate([PROMPTS[1], PROMPTS[0], PROMPTS[3]], [other, SEEDED, other])
    assert mixed[1].token_ids == seeded
