"""Rules that weigh sampled drafts, among requests of other kinds. That they are lossless is proved
in tests/engine/test_proof_rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal, Verifier, VerifyResult
from specengine.engine.factories import registered_verifiers
from specengine.kernels.accept.types import Accepted
from specengine.target.verify.coins import KeyedCoins
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.probs import RoundProbs
from specengine.target.verify.sampled import SampledVerifier
from specengine.target.verify.sibling import SiblingVerifier
from tests.target.verify_world import Draft, TableTarget, chain, decode_batch, propose
from tests.target.verify_world import request as make_req

VOCAB = 6
RULES: dict[str, SampledVerifier] = {
    name: rule for name, rule in registered_verifiers().items() if isinstance(rule, SampledVerifier)
}
CHAINS: list[Draft] = [chain(1, 2, 3), chain(4), ([], []), chain(3, 0)]
TREES: list[Draft] = [([1, 2, 3, 4], [0, 0, 1, 2]), chain(4), ([], []), ([3, 0, 5], [0, 0, 0])]
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 4},
    {"top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.5},
]


def drafts_of(name: str) -> list[Draft]:
    return TREES if RULES[name].takes_trees else CHAINS


def with_probs(proposal: DraftProposal, seeds: list[int]) -> DraftProposal:
    """Random ones for each seed, and absurd ones where none may be read."""
    width = proposal.tokens.shape[1]
    probs = []
    for seed, count in zip(seeds, proposal.num_nodes, strict=True):
        row = torch.rand(8, VOCAB, generator=torch.Generator().manual_seed(seed))[:width]
        row[0] = float("nan")
        row[count:] = float("nan")
        probs.append(row)
    return replace(proposal, draft_probs=torch.stack(probs))


def accept(
    verifier: Verifier,
    options: list[dict[str, Any]],
    drafts: list[Draft],
    first_seed: int = 0,
    certain: bool = False,
) -> VerifyResult:
    """Request i has the seed first_seed + i."""
    seeds = [first_seed + i for i in range(len(options))]
    reqs = [make_req(seed=seed, **one) for seed, one in zip(seeds, options, strict=True)]
    target, batch = TableTarget(VOCAB, seed=5), decode_batch(reqs, VOCAB)
    proposal = propose([1] * len(options), drafts)
    if not certain:
        proposal = with_probs(proposal, seeds)
        assert proposal.draft_probs is not None
        greedy = torch.tensor([req.sampling.is_greedy for req in reqs])
        proposal.draft_probs[greedy] = float("nan")
    return verifier.accept(target(batch, proposal), batch, proposal)


@pytest.mark.parametrize("name", RULES)
def test_greedy_requests_are_verified_greedily(name: str) -> None:
    drafts = drafts_of(name)
    result = accept(RULES[name], MIXED, drafts)
    expected = accept(MatchVerifier(), MIXED, drafts)
    for index, options in enumerate(MIXED):
        if options.get("temperature") == 0.0:
            assert result.tokens[index] == expected.tokens[index]


@pytest.mark.parametrize("name", RULES)
def test_greedy_drafts_that_are_right_stand(name: str) -> None:
    """All of them, under the rules that have a kernel; a rule may accept less and be lossless."""
    best = TableTarget(VOCAB, seed=5).table.argmax(-1)
    first = int(best[2, 1])
    second = int(best[1, first])
    drafts: list[Draft] = [chain(first, second), chain(0)]
    if RULES[name].takes_trees:
        drafts[0] = ([(first + 1) % VOCAB, first, second], [0, 0, 2])
    result = accept(RULES[name], [{"temperature": 0.0}, {}], drafts)
    stood = result.num_accepted[0]
    assert stood == 2 or (stood < 2 and RULES[name].kernel is None)
    assert result.tokens[0] == [first, second, int(best[first, second])][: stood + 1]
    assert result.kv_keep is None or result.kv_keep[0] == [0, 2, 3][: stood + 1]


@pytest.mark.parametrize("name", RULES)
def test_who_drafted_nothing_gets_the_token_of_plain_decoding(name: str) -> None:
    plain = accept(MatchVerifier(), MIXED, [([], [])] * 4, certain=True)
    assert accept(RULES[name], MIXED, drafts_of(name)).tokens[2] == plain.tokens[2]
    assert accept(RULES[name], MIXED, [([], [])] * 4) == plain


@pytest.mark.parametrize("name", RULES)
def test_a_request_does_not_feel_its_batch(name: str) -> None:
    drafts = drafts_of(name)
    for seed in range(20):
        batch = accept(RULES[name], MIXED, drafts, first_seed=seed)
        for index in (1, 2, 3):
            alone = accept(RULES[name], [MIXED[index]], [drafts[index]], first_seed=seed + index)
            assert alone.tokens == [batch.tokens[index]]


class OtherCoins(KeyedCoins):
    """Coins of the same numbers, which no kernel knows."""


class NoCoins(KeyedCoins):
    def pick(self, chances_BMK: Tensor, nodes_BM: Tensor) -> Tensor:
        return torch.full_like(nodes_BM, chances_BMK.shape[-1])


def decided(verifier: SampledVerifier, name: str) -> Iterator[Accepted]:
    """Decisions for a target that says every token at times."""
    target, options = TableTarget(VOCAB, seed=5, sharpness=0.5), [{}, {"top_p": 0.9}, *MIXED[2:]]
    for first_seed in range(20, 50):
        reqs = [make_req(seed=first_seed + i, **one) for i, one in enumerate(options)]
        batch = decode_batch(reqs, VOCAB)
        proposal = with_probs(propose([1] * 4, drafts_of(name)), [first_seed] * 4)
        logits = target(batch, proposal).logits
        probs = RoundProbs.of(logits, batch.sampling, proposal)
        yield verifier.decide_on_host(probs, batch.sampling)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_of_its_own_kernel_draws_as_the_others(name: str) -> None:
    """Coins and tokens by the same numbers as from judge, coins and next_uniforms."""
    judging, ends = copy(RULES[name]), set()
    judging.coins = OtherCoins
    pairs = zip(decided(RULES[name], name), decided(judging, name), strict=True)
    for found, expected in pairs:
        assert found.ends_B.tolist() == expected.ends_B.tolist()
        assert found.tokens_B.tolist() == expected.tokens_B.tolist()
        ends.add(tuple(found.ends_B.tolist()))
    assert len(ends) > 1


@pytest.mark.parametrize("name", RULES)
def test_what_stands_in_for_the_numbers_is_asked(name: str) -> None:
    verifier = copy(RULES[name])
    verifier.coins = NoCoins
    assert not torch.cat([found.ends_B for found in decided(verifier, name)]).any()
    asked: list[Tensor] = []

    class Asking(type(RULES[name])):
        def next_uniforms(self, probs: RoundProbs, ends_B: Tensor, _: SamplingBatch) -> Tensor:
            asked.append(ends_B)
            return torch.zeros_like(ends_B).double()

    for found in decided(Asking(), name):
        assert asked.pop() is found.ends_B


@pytest.mark.parametrize("name", [n for n, one in RULES.items() if one.needs_draft_probs])
def test_drafts_without_probabilities_are_matched(name: str) -> None:
    drafts = drafts_of(name)
    result = accept(RULES[name], MIXED, drafts, certain=True)
    assert result == accept(MatchVerifier(), MIXED, drafts, certain=True)


def test_a_tree_keeps_the_kv_of_its_path() -> None:
    options: list[dict[str, Any]] = [{"logprobs": 1}] * 200
    drafts: list[Draft] = [([1, 2, 3, 4], [0, 0, 1, 2])] * 200
    result = accept(SiblingVerifier(), options, drafts)
    assert result.kv_keep is not None
    assert result.logprobs is not None
    tokens = [1, 1, 2, 3, 4]
    for path, emitted, logprobs in zip(result.kv_keep, result.tokens, result.logprobs, strict=True):
        assert path in ([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4])
        assert emitted[:-1] == [tokens[node] for node in path[1:]]
        assert [entry.token for entry in logprobs] == emitted
    assert {len(path) for path in result.kv_keep} == {1, 2, 3}


def test_rows_are_what_plain_decoding_samples_from() -> None:
    """Penalties, min_tokens and filters after a path are those of a request that has said it."""
    options: dict[str, Any] = {
        "frequency_penalty": 0.8,
        "repetition_penalty": 1.3,
        "min_tokens": 3,
        "stop_token_ids": (5,),
        "top_p": 0.9,
        "temperature": 0.7,
    }
    target = TableTarget(VOCAB, seed=5)
    batch, proposal = decode_batch([make_req(**options)], VOCAB), propose([1], [TREES[0]])
    probs = RoundProbs.of(target(batch, proposal).logits, batch.sampling, proposal)
    for node, path in enumerate([[], [1], [2], [1, 3], [2, 4]]):
        req = make_req(**options)
        req.output_ids += path
        said, empty = decode_batch([req], VOCAB), propose([req.last_token], [([], [])])
        plain = RoundProbs.of(target(said, empty).logits, said.sampling, empty)
        torch.testing.assert_close(probs.target_TV[node], plain.target_TV[0])
