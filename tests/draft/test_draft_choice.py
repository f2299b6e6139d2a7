"""Drafted tokens: the best, or samples of the processed distribution."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from specengine.core.grammar import TokenMask
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.draft.choice import DraftChoice
from tests.support.chi_squared import chisquare

VOCAB = 12
NO_PATH = torch.empty(1, 0, dtype=torch.int64)


def sampling(*params: SamplingParams, output: list[int] | None = None) -> SamplingBatch:
    reqs = [
        Req(str(seed), [1, 2], one, seed=seed, output_ids=list(output or [3]))
        for seed, one in enumerate(params)
    ]
    return SamplingBatch.from_reqs(reqs, VOCAB, torch.device("cpu"))


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)


def logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_the_best_tokens_and_their_log_probabilities() -> None:
    choice, x = DraftChoice(sampling(greedy()), None), logits(3)
    chosen = choice.children(x, torch.zeros(3, 1, dtype=torch.int64), 4, 1)
    log_probs = x.log_softmax(-1)
    assert chosen.tokens_RK.equal(log_probs.topk(4).indices)
    torch.testing.assert_close(chosen.scores_RK, log_probs.topk(4).values)
    assert (chosen.weights_RV, chosen.exists_RK) == (None, None)
    assert choice.best(x[:1], NO_PATH).tolist() == [int(x[0].argmax())]


def test_drafted_ids_become_the_targets() -> None:
    ids = torch.tensor([2, 5, 7, 11])
    choice, x = DraftChoice(sampling(greedy()), ids), logits(1, 4)
    assert choice.best(x, NO_PATH).tolist() == [int(ids[x[0].argmax()])]
    assert choice.children(x, NO_PATH, 4, 1).tokens_RK.tolist() == [
        ids[x[0].argsort().flip(0)].tolist()
    ]


@pytest.mark.parametrize("ids", [None, torch.tensor([2, 5, 7, 11])])
def test_drafts_follow_the_edits_of_a_request(ids: torch.Tensor | None) -> None:
    """Bias, and penalties that count what was drafted above."""
    biased = sampling(greedy(logit_bias={7: 50.0}))
    x = logits(1, VOCAB if ids is None else len(ids))
    assert DraftChoice(biased, ids).best(x, NO_PATH).tolist() == [7]
    penalised = sampling(greedy(logit_bias={7: 50.0, 5: 49.0}, frequency_penalty=2.0))
    choice = DraftChoice(penalised, ids)
    assert choice.best(x * 0, NO_PATH).tolist() == [7]
    assert choice.best(x * 0, torch.tensor([[7]])).tolist() == [5]
    chosen = choice.children(x.expand(2, -1) * 0, torch.tensor([[7, 7], [5, 5]]), 1, 1)
    assert chosen.tokens_RK.tolist() == [[5], [7]]


def test_min_tokens_holds_for_the_position_drafted() -> None:
    held = sampling(greedy(stop_token_ids=(4,), min_tokens=3, max_tokens=9))
    x = torch.zeros(1, VOCAB)
    x[0, 4] = 9.0
    choice = DraftChoice(held, None)
    assert choice.best(x, torch.zeros(1, 1, dtype=torch.int64)).tolist() != [4]
    assert choice.best(x, torch.zeros(1, 2, dtype=torch.int64)).tolist() == [4]


def test_grammar_masks_of_the_target_are_not_read() -> None:
    nothing = TokenMask(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    masked = replace(sampling(greedy(logit_bias={7: 50.0})), mask=nothing)
    assert DraftChoice(masked, None).best(logits(), NO_PATH).tolist() == [7]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6, "top_k": 5, "top_p": 0.9}])
def test_siblings_are_drawn_without_replacement(params: dict[str, Any]) -> None:
    """First and second child against their exact joint distribution."""
    count, x = 4000, logits()
    batch = sampling(*[SamplingParams(**{"temperature": 1.0, **params})] * count)
    choice = DraftChoice(batch, None, draws=True)
    chosen = choice.children(x.expand(count, -1), NO_PATH.expand(count, -1), 2, 1)
    assert chosen.weights_RV is not None
    weights = chosen.weights_RV[0].double()
    probs = (weights / weights.sum()).tolist()
    pairs = {
        (i, j): p * q / (1 - p)
        for i, p in enumerate(probs)
        for j, q in enumerate(probs)
        if i != j and p and q
    }
    seen = Counter(map(tuple, chosen.tokens_RK.tolist()))
    assert set(seen) <= set(pairs)
    common = [pair for pair, mass in pairs.items() if mass * count >= 5]
    observed = [seen[pair] for pair in common] + [sum(seen.values()) - sum(seen[p] for p in common)]
    expected = [pairs[pair] * count for pair in common]
    expected.append(count - sum(expected))
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1]
    assert chisquare(observed, expected, sum_check=False).pvalue > 1e-3


def test_what_a_sure_sibling_leaves_is_drawn_as_finely() -> None:
    """Weights of 6.1 and 1.7 units of the best one's."""
    count, x = 4000, torch.full((1, VOCAB), float("-inf"))
    x[0, [3, 7, 1]] = torch.tensor([0.0, -28.0, -29.3])
    choice = DraftChoice(sampling(*[SamplingParams()] * count), None, draws=True)
    chosen = choice.children(x.expand(count, -1), NO_PATH.expand(count, -1), 3, 1)
    assert set(chosen.tokens_RK[:, 0].tolist()) == {3}
    second = Counter(chosen.tokens_RK[:, 1].tolist())
    shares = x[0, [7, 1]].double().softmax(-1) * count
    assert chisquare([second[7], second[1]], shares.tolist()).pvalue > 1e-3


def test_children_end_where_the_distribution_does() -> None:
    batch = sampling(SamplingParams(temperature=1.0, top_k=2))
    chosen = DraftChoice(batch, None, draws=True).children(logits(), NO_PATH, 4, 1)
    assert chosen.exists_RK is not None
    assert chosen.exists_RK.tolist() == [[True, True, False, False]]
    assert set(chosen.tokens_RK[0, :2].tolist()) == set(logits()[0].topk(2).indices.tolist())


def test_greedy_requests_beside_sampled_ones_get_the_best() -> None:
    batch = sampling(SamplingParams(temperature=1.0, top_k=2), greedy())
    x = logits(2)
    chosen = DraftChoice(batch, None, draws=True).children(x, NO_PATH.expand(2, -1), 3, 1)
    assert chosen.exists_RK is not None
    assert chosen.tokens_RK[1].equal(x[1].topk(3).indices)
    torch.testing.assert_close(chosen.scores_RK[1], x[1].log_softmax(-1).topk(3).values)
    assert chosen.exists_RK[1].all()


def test_draws_differ_by_node_and_position_and_repeat_by_seed() -> None:
    batch = sampling(SamplingParams(temperature=5.0))
    x, one = logits(), torch.zeros(1, 1, dtype=torch.int64)
    choice = DraftChoice(batch, None, draws=True)

    def drawn(path: torch.Tensor, first_node: int) -> list[int]:
        tokens = choice.children(x.expand(40, -1), path.expand(40, -1), 1, first_node).tokens_RK
        return [int(token) for token in tokens.flatten()]

    assert drawn(NO_PATH, 1) == drawn(NO_PATH, 1)
    assert drawn(NO_PATH, 1) != drawn(NO_PATH, 101)
    assert drawn(NO_PATH, 1) != drawn(one, 1)
    assert drawn(NO_PATH, 1)[1:] == drawn(NO_PATH, 2)[:-1], "a node has one number"


def test_scores_by_rank_do_not_know_probabilities() -> None:
    choice = DraftChoice(sampling(greedy()), None, by_rank=True)
    left, right = (choice.children(logits(seed=seed), NO_PATH, 3, 1) for seed in (0, 1))
    assert left.scores_RK.equal(right.scores_RK)
    assert left.tokens_RK.tolist() == [logits()[0].topk(3).indices.tolist()]
    falling = left.scores_RK[0]
    assert (falling[1:] < falling[:-1]).all()
    assert float(falling.exp().sum()) < 1
