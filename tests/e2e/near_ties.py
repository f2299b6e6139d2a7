"""Answers in half precision, where a batch of another form rounds otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.engine.llm import Generation

TIE = 0.1  # nats


def assert_same_but_for_ties(found: Sequence[Generation], expected: Sequence[Generation]) -> int:
    """How many answers part. Each may, where both tokens are as near to the best one as half
    precision rounds: behind that they are different texts. expected: with logprobs, of as many
    tokens as can be so near: two, or more of a small random model."""
    num_apart = 0
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        apart = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if apart is None:
            continue
        num_apart += 1
        top = other.completions[0].logprobs[apart].top
        near = [token for token, logprob in top if top[0][1] - logprob < TIE]
        assert {one.token_ids[apart], other.token_ids[apart]} <= {*near}, (index, apart)
    return num_apart
