"""Target-only acceptance beside test_accept_sampled: what is left of the target below a path."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from specengine.kernels.accept.accept_target_only import accept_target_only
from specengine.kernels.accept.types import SampledRound
from specengine.kernels.dispatch import Backend
from tests.kernels.sampled_world import CPU, draws_of, moved, peaked, random_round, round_of

BATCH = 24
backends = pytest.mark.parametrize("backend", ["torch", "triton"])


def rounds(parents: list[int], tokens: list[int], target: list[list[float]]) -> SampledRound:
    """As many requests that draft the same, without draft weights."""
    rows, greedy = torch.tensor(target).repeat(BATCH, 1), torch.zeros(BATCH, dtype=torch.bool)
    drafts = torch.zeros(BATCH, len(parents), rows.shape[1])
    made = round_of([parents] * BATCH, [tokens] * BATCH, rows, drafts, greedy)
    return replace(made, draft_BNV=None)


@backends
def test_children_that_fell_are_not_drawn(backend: Backend, device: torch.device) -> None:
    """What the target never says does not stand, whatever stands beside it."""
    leaf = [0.0, 0.0, 0.0, 0.0, 1.0]
    rows = [[0.0, 0.5, 0.0, 0.2, 0.3], leaf, leaf, leaf]
    drafts = rounds([0, 0, 0, 0], [4, 0, 1, 2], rows)
    found = accept_target_only(moved(drafts, device), draws_of(BATCH, device), backend=backend)
    pairs = set(zip(found.ends_B.tolist(), found.tokens_B.tolist(), strict=True))
    assert pairs == {(0, 3), (0, 4), (2, 4)}


@backends
def test_where_nothing_is_left_the_target_speaks(backend: Backend, device: torch.device) -> None:
    """Sums that are too large stand for rounding, by which a coin may fall beyond all children."""
    drafts = rounds([0, 0, 1], [2, 1, 2], [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    drafts = replace(drafts, target_sum_T=drafts.target_sum_T * 2)
    found = accept_target_only(moved(drafts, device), draws_of(BATCH, device), backend=backend)
    pairs = set(zip(found.ends_B.tolist(), found.tokens_B.tolist(), strict=True))
    assert pairs == {(0, 1), (1, 2), (2, 0)}


def test_what_drafts_were_sampled_from_is_not_read(device: torch.device) -> None:
    drafts = peaked(random_round(random.Random(1), 4, 21, 50, tree=True))
    without = replace(drafts, draft_BNV=None)
    expected = accept_target_only(without, draws_of(4, CPU), backend="torch")
    for given in (drafts, without):
        found = accept_target_only(moved(given, device), draws_of(4, device), backend="triton")
        assert found.ends_B.tolist() == expected.ends_B.tolist()
        assert found.tokens_B.tolist() == expected.tokens_B.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("nodes", [16, 100])
def test_wide_trees_of_a_large_vocabulary(nodes: int, batch: int) -> None:
    """Against the reference on the same device, which is faster."""
    device, ends = torch.device("cuda"), set()
    for seed in range(4):
        made = peaked(random_round(random.Random(seed), batch, nodes, 128_256, tree=True))
        drafts = moved(replace(made, draft_BNV=None), device)
        draws = draws_of(batch, device, 100 * seed)
        expected = accept_target_only(drafts, draws, backend="torch")
        found = accept_target_only(drafts, draws)
        assert found.ends_B.tolist() == expected.ends_B.tolist()
        assert found.tokens_B.tolist() == expected.tokens_B.tolist()
        ends |= set(found.ends_B.tolist())
    assert len(ends) > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_row_is_copied() -> None:
    """A launch takes some kilobytes a request; a row of the vocabulary in float64 is a megabyte."""
    made = peaked(random_round(random.Random(1), 16, 9, 128_256, tree=True))
    drafts = moved(replace(made, draft_BNV=None), torch.device("cuda"))
    draws = draws_of(16, drafts.roots_B.device)
    accept_target_only(drafts, draws)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    accept_target_only(drafts, draws)
    assert torch.cuda.max_memory_allocated() - before < 128_256
