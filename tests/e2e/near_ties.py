"""Answers in half precision, where a batch of another form rounds otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.engine.llm import Generation

TIE = 0.1  # nats


def assert_same_but_for_ties(found: Sequence[Generation], expected: Sequence[Generation]) -> int:
    """How many answers part. Each may, where the two best tokens are as near as half precision
    rounds: behind that they are different texts. expected: with logprobs=2."""
    num_apart = 0
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        apart = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if apart is None:
            continue
        num_apart += 1
        (best, best_logprob), (second, second_logprob) = other.completions[0].logprobs[apart].top
        assert {one.token_ids[apart], other.token_ids[apart]} == {best, second}, (index, apart)
        assert best_logprob - second_logprob < TIE, (index, apart)
    return num_apart
