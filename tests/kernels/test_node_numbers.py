"""Rules of trees in which nodes were cut: what is left is judged as if it stood alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specengine.kernels.accept.accept_sibling import accept_sibling
from specengine.kernels.accept.accept_target_only import accept_target_only
from specengine.kernels.accept.types import Accepted, SampledRound
from specengine.kernels.dispatch import Backend
from tests.kernels.sampled_world import CPU, draws_of, moved, peaked, random_round

BATCH, WIDTH, WHOLE = 4, 6, 11
RULES: dict[str, Callable[..., Accepted]] = {
    "sibling": accept_sibling,
    "target_only": accept_target_only,
}


def spread(drafts: SampledRound, places_BN: Tensor) -> SampledRound:
    """Its nodes in these places of larger trees, in which all others were cut: what belongs to
    those is absurd, as far as anybody may look at it."""
    vocab, counts_B = drafts.target_TV.shape[1], drafts.exists_BN.sum(1)
    target = torch.full((BATCH, WHOLE, vocab), float("nan"))
    draft = torch.full((BATCH, WHOLE, vocab), float("nan"))
    sums = torch.ones(BATCH, WHOLE, dtype=torch.float64)
    none = torch.zeros(BATCH, WHOLE, dtype=torch.int64)
    tokens, parents, depths, numbers = none.clone(), none.clone(), none - 1, none - 1
    exists = none.bool()
    for b, count in enumerate(counts_B.tolist()):
        first, at = int(drafts.roots_B[b]), places_BN[b, :count]
        target[b, at] = drafts.target_TV[first : first + count]
        sums[b, at] = drafts.target_sum_T[first : first + count]
        assert drafts.draft_BNV is not None
        draft[b, at] = drafts.draft_BNV[b, :count]
        tokens[b, at] = drafts.tokens_BN[b, :count]
        parents[b, at] = places_BN[b, drafts.parents_BN[b, :count]]
        depths[b, at] = drafts.depths_BN[b, :count]
        numbers[b, at] = torch.arange(count)
        exists[b, at] = True
    return SampledRound(
        target_TV=target.flatten(0, 1),
        target_sum_T=sums.flatten(),
        draft_BNV=draft,
        tokens_BN=tokens,
        parents_BN=parents,
        exists_BN=exists,
        depths_BN=depths,
        roots_B=WHOLE * torch.arange(BATCH),
        greedy_B=drafts.greedy_B,
        numbers_BN=numbers,
    )


def places_of(rng: random.Random) -> Tensor:
    """int64 [B, N], rising, the root first."""
    rows = [[0, *sorted(rng.sample(range(1, WHOLE), WIDTH - 1))] for _ in range(BATCH)]
    return torch.tensor(rows)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", RULES)
def test_what_is_left_is_judged_by_its_numbers(
    name: str, backend: Backend, device: torch.device
) -> None:
    rule, ends = RULES[name], list[int]()
    told_apart = 0
    rounds = {"torch": 40, "triton": 12} if name == "target_only" else {"torch": 24, "triton": 7}
    for seed in range(rounds[backend]):
        rng = random.Random(seed)
        drafts, places_BN = random_round(rng, BATCH, WIDTH, 9, tree=True), places_of(rng)
        drafts = peaked(drafts) if name == "target_only" else drafts
        expected = rule(drafts, draws_of(BATCH, CPU, 10 * seed))
        whole, draws = spread(drafts, places_BN), draws_of(BATCH, device, 10 * seed)
        found = rule(moved(whole, device), draws, backend=backend)
        places_B = places_BN.gather(1, expected.ends_B[:, None])[:, 0]
        assert found.ends_B.tolist() == places_B.tolist()
        assert found.tokens_B.tolist() == expected.tokens_B.tolist()
        by_place = rule(replace(whole, numbers_BN=None), draws_of(BATCH, CPU, 10 * seed))
        told_apart += by_place.ends_B.tolist() != places_B.tolist()
        ends += expected.ends_B.tolist()
    assert len(set(ends)) >= 4
    assert told_apart > (2 if backend == "torch" else 0), "places would have done"
