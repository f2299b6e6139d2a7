"""Verification gives what plain decoding gives: token by token, and in distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.core.request import Req
from specengine.target.verify.match import MatchVerifier
from tests.support.chi_squared import chisquare
from tests.target.verify_mutants import mutants
from tests.target.verify_world import Draft, TableTarget, chain, decode_batch, generate, propose
from tests.target.verify_world import request as make_req

VOCAB = 5
LENGTH = 12
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6, "top_p": 0.8},
    {"top_k": 2, "frequency_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.6, "presence_penalty": 0.5},
    {"min_tokens": 9, "stop_token_ids": (3,)},
    {"min_p": 0.2, "logit_bias": {1: 1.0}},
]


def random_draft(generator: torch.Generator, tree: bool) -> Draft:
    """Up to five nodes with different siblings, parents first; sometimes none at all."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(int(torch.randint(6, (), generator=generator))):
        last = len(tokens)
        parent = int(torch.randint(last + 1, (), generator=generator)) if tree else last
        token = int(torch.randint(VOCAB, (), generator=generator))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def outputs(verifier: MatchVerifier, seed: int, tree: bool, draft: bool = True) -> list[list[int]]:
    """Every option in one batch, drafts drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    reqs = [make_req(seed=100 * seed + i, **options) for i, options in enumerate(OPTIONS)]

    def drafted(req: Req) -> Draft:
        return random_draft(generator, tree) if draft else ([], [])

    return generate(TableTarget(VOCAB, seed), verifier, reqs, LENGTH, drafted)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.booleans())
def test_identical_to_plain_decoding(seed: int, tree: bool) -> None:
    assert outputs(MatchVerifier(), seed, tree) == outputs(MatchVerifier(), seed, tree, draft=False)


@pytest.mark.parametrize("name", mutants())
def test_identity_catches_every_mutant(name: str) -> None:
    differs = [
        outputs(mutants()[name], seed, tree=False) != outputs(MatchVerifier(), seed, False, False)
        for seed in range(8)
    ]
    assert any(differs)


def test_greedy_rounds_follow_the_argmax() -> None:
    target, req = TableTarget(VOCAB, seed=3), make_req(temperature=0.0)
    generator = torch.Generator().manual_seed(0)
    [output] = generate(
        target, MatchVerifier(), [req], LENGTH, lambda _: random_draft(generator, tree=True)
    )
    text = [2, 1]
    for _ in range(LENGTH - 1):
        text.append(int(target.table[text[-2], text[-1]].argmax()))
    assert output == text[1:]


def joint_pvalue(verifier: MatchVerifier, draft: Draft, count: int = 4000) -> float:
    """χ² of the first three tokens over `count` seeds against their exact joint distribution."""
    target = TableTarget(3, seed=1, sharpness=0.7)
    reqs = [make_req(seed=s) for s in range(count)]
    found = generate(target, verifier, reqs, 4, lambda _: draft)
    cells = torch.tensor([9 * a + 3 * b + c for _, a, b, c in found])
    probs = target.table.softmax(-1).cpu()
    first = probs[2, 1]
    joint = first[:, None, None] * probs[1][:, :, None] * probs
    expected = joint.flatten().double() * count
    expected *= count / expected.sum()
    counts = torch.bincount(cells, minlength=27)
    return float(chisquare(counts.numpy(), expected.numpy()).pvalue)


TREES: dict[str, Draft] = {
    "nothing": ([], []),
    "chain": chain(0, 1),
    "two branches": ([0, 1, 2, 2], [0, 0, 1, 2]),
    "every token": ([0, 1, 2], [0, 0, 0]),
}


@pytest.mark.parametrize("name", TREES)
def test_joint_distribution_is_the_target(name: str) -> None:
    assert joint_pvalue(MatchVerifier(), TREES[name]) > 1e-3


@pytest.mark.parametrize("name", [n for n in mutants() if "penalties" not in n and "off" not in n])
def test_the_same_test_catches_wrong_rules(name: str) -> None:
    assert joint_pvalue(mutants()[name], TREES["chain"]) < 1e-9


def test_acceptance_is_the_probability_of_the_children() -> None:
    """The most that any lossless rule accepts, counted over seeds."""
    target, count = TableTarget(4, seed=2), 6000
    batch = decode_batch([make_req(seed=s) for s in range(count)], 4)
    proposal = propose([1] * count, [([3, 0], [0, 0])] * count)
    result = MatchVerifier().accept(target(batch, proposal), batch, proposal)
    accepted = sum(result.num_accepted)
    chance = float(target.table[2, 1].softmax(-1)[[3, 0]].sum())
    observed, expected = [accepted, count - accepted], [count * chance, count * (1 - chance)]
    assert chisquare(observed, expected).pvalue > 1e-3
