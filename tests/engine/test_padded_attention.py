"""The attention of engines that fly on a CPU is the reference's."""

from __future__ import annotations

import pytest
import torch

from specengine.kernels.attention import paged_attention_ref
from specengine.kernels.attention.types import PagedBatch
from tests.support.padded_attention import padded_attention


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("has_first", [False, True])
@pytest.mark.parametrize("num_past", [None, 0, 2], ids=["chains", "trees", "trees with a past"])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_references(
    seed: int, num_past: int | None, has_first: bool, window: int | None
) -> None:
    """Requests of no query are among others, and drafts past the context."""
    torch.manual_seed(seed)
    counts = torch.tensor([[1, 4, 0, 3], [5, 5, 5, 5], [0, 0, 2, 0], [7, 1, 1, 1]][seed])
    past = num_past or 0
    lens = counts + past + torch.randint(0, 12, (4,))
    if seed % 2:
        lens[1] = 18 + counts[1]
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    most, total = int(counts.max()), int(counts.sum()) + 2
    mask = None
    if num_past is not None:
        own = torch.eye(most, dtype=torch.bool)
        mask = torch.cat(
            (torch.rand(4, most, past) < 0.5, own | (torch.rand(4, most, most) < 0.4)), 2
        )
    batch = PagedBatch(
        req_to_token=torch.randint(0, 50, (6, 20), dtype=torch.int32),
        req_pool_indices=torch.tensor([4, 1, 5, 2]),
        seq_lens=lens,
        qo_indptr=indptr,
        positions=torch.randint(0, 25, (total,)),
        max_queries=most,
        max_keys=99,
        tree_mask=mask,
        num_past=past,
        first_keys=torch.randint(0, 15, (6,)) if has_first else None,
    )
    q, k, v = torch.randn(total, 6, 8), torch.randn(50, 2, 8), torch.randn(50, 2, 8)
    found, expected = (
        one(q, k, v, batch, 0.3, window)[: int(counts.sum())]
        for one in (padded_attention, paged_attention_ref.paged_attention)
    )
    torch.testing.assert_close(found, expected, equal_nan=True)
