"""SmolLM2 with the EAGLE-3 drafter that ships: more than two tokens a round, and the same ones."""

from __future__ import annotations

import pytest

from specengine import SamplingParams, SpecConfig
from specengine.core.spec_stats import SpecStats
from specengine.engine.chat_template import render_chat
from specengine.engine.outputs import add_stats
from tests.e2e.conftest import Make

pytestmark = pytest.mark.slow

PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a Python function that reverses a linked list.",
    "What is 17 * 23? Show your steps.",
]
SETTINGS = {
    "chain of 3": SpecConfig(algorithm="EAGLE3", adaptive=False, num_steps=3),
    "chain of 5": SpecConfig(
        algorithm="EAGLE3", adaptive=False, draft_model_path="smollm2-135m-eagle3", num_steps=5
    ),
    "tree of 16": SpecConfig(
        algorithm="EAGLE3", adaptive=False, num_steps=5, eagle_topk=4, num_draft_tokens=16
    ),
}


def answer(
    make: Make, spec: SpecConfig | None, max_tokens: int = 15
) -> tuple[list[list[int]], float]:
    """Token ids, greedy in float32, and tokens a round."""
    llm = make(spec, max_total_tokens=2048)
    ids = [render_chat(llm.tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    done = llm.generate(ids, params, progress=False)
    total = SpecStats()
    for one in done:
        add_stats(total, one.spec)
    return [one.token_ids for one in done], total.mean_acceptance_length


@pytest.fixture(scope="module")
def plain(smollm2_llm: Make) -> list[list[int]]:
    return answer(smollm2_llm, None)[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("chain of 3", marks=pytest.mark.model),
        "chain of 5",
        pytest.param("tree of 16", marks=pytest.mark.model),
    ],
)
def test_the_same_tokens_in_fewer_rounds(
    smollm2_llm: Make, plain: list[list[int]], name: str
) -> None:
    tokens, accepted_length = answer(smollm2_llm, SETTINGS[name])
    assert tokens == plain
    assert accepted_length > 2.0
