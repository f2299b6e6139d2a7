"""Recursive rejection in a cluster of blocks against plain PyTorch: on a GPU, or emulated."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from specengine.kernels.accept.accept_sibling import accept_sibling
from specengine.kernels.accept.types import Accepted, SampledRound
from tests.halves import each_value
from tests.kernels.conftest import HAS_CUDA
from tests.kernels.emulated_rows import emulate_rows
from tests.kernels.sampled_world import CPU, draws_of, moved, random_round

DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_CUDA:
        emulate_rows(request.getfixturevalue("emulated"), monkeypatch)


def decided(drafts: SampledRound, seed: int) -> Accepted:
    """As the reference does, which is checked."""
    batch = len(drafts.roots_B)
    expected = accept_sibling(drafts, draws_of(batch, CPU, seed), backend="torch")
    draws = draws_of(batch, DEVICE, seed)
    found = accept_sibling(moved(drafts, DEVICE), draws, backend="cuda")
    assert found.ends_B.tolist() == expected.ends_B.tolist()
    assert found.tokens_B.tolist() == expected.tokens_B.tolist()
    return expected


@pytest.mark.parametrize(("vocab", "tree"), each_value(1, [9, 300, 1500], [False, True]))
def test_it_decides_as_the_reference(vocab: int, tree: bool) -> None:
    ends = Counter[int]()
    for seed in range(6):
        drafts = random_round(random.Random(seed), 4, 6, vocab, tree)
        ends.update(decided(drafts, 100 * seed).ends_B.tolist())
    assert len(ends) >= 3


@pytest.mark.usefixtures("seeded")
def test_coins_follow_numbers() -> None:
    """Also of nodes that are not numbered by their places."""
    apart = 0
    for seed in range(20):
        drafts = random_round(random.Random(seed), 3, 6, 40, tree=True)
        numbers = torch.stack([torch.randperm(6) for _ in range(3)])
        other = decided(replace(drafts, numbers_BN=numbers), seed)
        apart += int((other.ends_B != decided(drafts, seed).ends_B).sum())
    assert apart > 1


def test_tensors_may_lie_anyhow() -> None:
    drafts = random_round(random.Random(5), 3, 5, 70, tree=True)
    expected = decided(drafts, 1)
    moved_ = moved(drafts, DEVICE)
    assert moved_.draft_BNV is not None
    spread = torch.stack([moved_.draft_BNV, moved_.draft_BNV * 0], dim=-1)[..., 0]
    turned = moved_.draft_BNV.transpose(0, 1).contiguous().transpose(0, 1)
    for draft in (spread, turned):
        assert not draft.is_contiguous()
        others = {"tokens_BN": moved_.tokens_BN.T.contiguous().T, "draft_BNV": draft}
        lying = replace(moved_, **others)
        found = accept_sibling(lying, draws_of(3, DEVICE, 1), backend="cuda")
        assert found.ends_B.tolist() == expected.ends_B.tolist()
        assert found.tokens_B.tolist() == expected.tokens_B.tolist()


def test_a_target_that_says_nothing() -> None:
    """A request that has ended has rows of whatever lay in memory: its token exists, and
    no other request feels it."""
    drafts = random_round(random.Random(2), 4, 6, 300, tree=True)
    expected = decided(drafts, 7)
    for nothing in (0.0, float("nan")):
        targets, sums = drafts.target_TV.clone(), drafts.target_sum_T.clone()
        first, last = drafts.roots_B[2:4].tolist()
        targets[first:last], sums[first:last] = nothing, nothing
        broken = moved(replace(drafts, target_TV=targets, target_sum_T=sums), DEVICE)
        found = accept_sibling(broken, draws_of(4, DEVICE, 7), backend="cuda")
        assert 0 <= found.tokens_B[2].item() < 300
        for b in (0, 1, 3):
            assert (found.ends_B[b], found.tokens_B[b]) == (
                expected.ends_B[b],
                expected.tokens_B[b],
            )
