"""SmolLM2 in float32 says what transformers says, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specengine import SamplingParams, SpecConfig
from specengine.core.config import ModelConfig
from specengine.engine.chat_template import render_chat
from specengine.runner.loader.source import resolve_model
from tests.e2e.conftest import Make

pytestmark = pytest.mark.slow

NEW_TOKENS = 10
PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a Python function that reverses a linked list.",
    "Repeat after me, three times: the cat sat on the mat.",
    "Explain photosynthesis to a child.",
    "Translate to French: good morning, my friends.",
    "List the planets of the solar system.",
    "What is 17 * 23? Show your steps.",
    "Write a haiku about the sea.",
    "Who wrote Don Quixote?",
    "Give me a recipe for pancakes.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "Fix the grammar: he go to school yesterday and eat lunch.",
    "Write a SQL query that counts users by country.",
    "What are the pros and cons of remote work?",
    "Continue the sequence: 1, 1, 2, 3, 5, 8,",
    "Describe the colour blue to someone who cannot see.",
    "Write a polite email that declines an invitation.",
    "What causes the seasons?",
    "Return this JSON unchanged: {'a': [1, 2, 3], 'b': {'c': null}}",
    "Tell me a joke about computers. 😀 ¿Por qué no?",
]
CHAIN = SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=5)
TREE = SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=8, ngram_branches=3)


@pytest.fixture(scope="module")
def reference(smollm2: str) -> Any:
    import transformers

    directory = resolve_model(ModelConfig(model=smollm2)).directory
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


Pairs = list[tuple[list[int], list[int]]]


def generate(make: Make, count: int, new_tokens: int, **flags: Any) -> Pairs:
    """(prompt, output) token ids of the first prompts, greedy, all in one batch."""
    llm = make(**{"max_total_tokens": 8192, **flags})
    ids = [render_chat(llm.tokenizer, [{"role": "user", "content": p}]) for p in PROMPTS[:count]]
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    results = llm.generate(ids, params, progress=False)
    llm.engine.scheduler.check_invariant()
    return [(prompt, one.token_ids) for prompt, one in zip(ids, results, strict=True)]


def says_the_same(reference: Any, prompt: list[int], output: list[int]) -> None:
    """Greedy decoding is a fixed point: the output is transformers' if and only if each token is
    the best one after those before it."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == output


@pytest.fixture(scope="module")
def plain(reference: Any, smollm2_llm: Make) -> Pairs:
    """Four prompts, one token at a time; as transformers answers them."""
    results = generate(smollm2_llm, 4, NEW_TOKENS)
    for prompt, output in results:
        assert len(output) == NEW_TOKENS
        says_the_same(reference, prompt, output)
    return results


@pytest.mark.model
def test_prompts_in_a_batch(smollm2_llm: Make, plain: Pairs) -> None:
    assert generate(smollm2_llm, 4, NEW_TOKENS, spec=CHAIN) == plain


def test_all_prompts_in_a_batch(reference: Any, smollm2_llm: Make) -> None:
    results = generate(smollm2_llm, len(PROMPTS), 128)
    for prompt, output in results:
        assert len(output) == 128
        says_the_same(reference, prompt, output)
    assert generate(smollm2_llm, len(PROMPTS), 128, spec=CHAIN) == results


@pytest.mark.parametrize(
    "flags",
    [
        {"spec": TREE, "page_size": 16},
        {"spec": CHAIN, "chunked_prefill_size": 16},
        {"spec": CHAIN, "max_total_tokens": 192},
        {"enable_mixed_chunk": True, "chunked_prefill_size": 16},
        pytest.param(
            {"spec": TREE, "page_size": 16, "chunked_prefill_size": 16}, marks=pytest.mark.model
        ),
        pytest.param(
            {"enable_mixed_chunk": True, "chunked_prefill_size": 16, "max_total_tokens": 192},
            marks=pytest.mark.model,
        ),
    ],
    ids=[
        *("tree and pages", "chunks", "little memory", "mixed"),
        *("tree, pages and chunks", "mixed in little memory"),
    ],
)
def test_however_it_gets_there(smollm2_llm: Make, plain: Pairs, flags: dict[str, Any]) -> None:
    assert generate(smollm2_llm, 4, NEW_TOKENS, **flags) == plain


@pytest.mark.model
def test_logits(reference: Any, smollm2_llm: Make) -> None:
    """Within 1e-4 of transformers', relative to the largest."""
    llm = smollm2_llm(max_total_tokens=8192)
    for text in PROMPTS[:2]:
        ids = render_chat(llm.tokenizer, [{"role": "user", "content": text}])
        params = SamplingParams(max_tokens=1, prompt_logprobs=5, temperature=0.0)
        result = llm.generate([ids], params)[0]
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        for position, entry in enumerate(result.prompt_logprobs[1:]):
            assert entry is not None
            for token, logprob in [(entry.token, entry.logprob), *entry.top]:
                want = float(expected[position, token])
                assert logprob == pytest.approx(want, rel=1e-4, abs=1e-4)
