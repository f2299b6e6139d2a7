"""Whole answers in half precision, where the kernels run that take nothing else: with drafts they
are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine.chat_template import render_chat
from specengine.engine.llm import Generation
from specengine.kernels.head import head_best_cuda, head_topk_cuda
from specengine.kernels.linear import decoder_stack_cuda
from tests.device import ON_HOPPER
from tests.e2e.near_ties import assert_same_but_for_ties
from tests.kernels.counted_rows import count_rows

pytestmark = ON_HOPPER

PROMPTS = ["What is the capital of France?", "Count from one to ten.", "Hello! Who are you?"]
ASKED = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0, logprobs=2)
UNTOLD = replace(ASKED, logprobs=None)
CHAIN: dict[str, Any] = {"num_steps": 3, "adaptive": False}
TREE: dict[str, Any] = CHAIN | {"eagle_topk": 2, "num_draft_tokens": 5}
WIDE: dict[str, Any] = CHAIN | {"eagle_topk": 4, "num_draft_tokens": 16}
SPECS = {
    "NGRAM": SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=4),
    **{
        f"{name} {shape}": SpecConfig(algorithm=name, **options)
        for name in ("EAGLE3", "MTP", "STANDALONE")
        for shape, options in (("chain", CHAIN), ("tree", TREE))
    },
    "EAGLE3, K chosen": SpecConfig(algorithm="EAGLE3", num_steps=3),
}

MORE_TREES = {
    "EAGLE3 wide": SpecConfig(algorithm="EAGLE3", **WIDE),
    "MTP": SpecConfig(algorithm="MTP", **TREE),
}


@pytest.fixture(params=["bfloat16", "float16"])
def make(request: pytest.FixtureRequest) -> Any:
    return partial(LLM, "tiny", dtype=request.param, max_total_tokens=2048)


@pytest.fixture
def num_stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward whose layers are one kernel, as captured or run."""
    return count_rows(decoder_stack_cuda, "decoder_stack", monkeypatch)


@pytest.fixture
def num_heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As above, of every head that chooses tokens without writing logits."""
    return count_rows(head_best_cuda, "head_best", monkeypatch)


@pytest.fixture
def num_shares(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As above, of every head that tells a tree what it needs of its logits."""
    return count_rows(head_topk_cuda, "head_topk", monkeypatch)


def answers(llm: LLM, num_prompts: int, asked: SamplingParams = ASKED) -> list[Generation]:
    ids = [render_chat(llm.tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    return llm.generate(ids[:num_prompts], asked, progress=False)


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_drafts_change_nothing(make: Any, num_prompts: int, num_stacks: list[int]) -> None:
    """A forward of one row and one of several round alike only up to the order of their sums."""
    expected = answers(make(None), num_prompts)
    apart = {}
    for name, spec in SPECS.items():
        num_stacks.clear()
        found = answers(make(spec), num_prompts)
        assert sum(one.spec.num_accepted for one in found) > 0, name
        assert max(num_stacks, default=0) >= 4 * num_prompts, name
        apart[name] = assert_same_but_for_ties(found, expected)
    assert sum(apart.values()) <= len(SPECS) * num_prompts // 4, apart


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_tokens_without_logits(
    make: Any, num_prompts: int, num_heads: list[int], num_shares: list[int]
) -> None:
    """Who asks for logprobs has logits; who does not, tokens that the head's own kernel chooses."""
    expected = answers(make(None), num_prompts)
    apart = {}
    for name in ("plain", "EAGLE3 chain", "EAGLE3 tree"):
        num_heads.clear()
        num_shares.clear()
        found = answers(make(SPECS.get(name)), num_prompts, UNTOLD)
        assert num_heads, name
        assert bool(num_shares) == name.endswith("tree"), name
        apart[name] = assert_same_but_for_ties(found, expected)
    assert sum(apart.values()) <= num_prompts, apart


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_more_trees(make: Any, num_prompts: int, num_shares: list[int]) -> None:
    """Trees of 16 nodes, whose rows attention takes in tiles from two requests on; and MTP's."""
    expected = answers(make(None), num_prompts)
    apart = {}
    for name, spec in MORE_TREES.items():
        for asked in (ASKED, UNTOLD):
            num_shares.clear()
            found = answers(make(spec), num_prompts, asked)
            assert sum(one.spec.num_accepted for one in found) > 0, name
            assert num_shares, name
            apart[name, asked.logprobs] = assert_same_but_for_ties(found, expected)
    assert sum(apart.values()) <= len(apart) * num_prompts // 2, apart
