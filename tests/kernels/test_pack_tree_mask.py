"""Packed masks of trees against numpy's packing of masks that are written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine.kernels.attention.pack_tree_mask import pack_tree_mask
from specengine.kernels.dispatch import Backend
from specengine.runner.attention.torch_masks import visible_BQK


def check(lens: list[tuple[int, int]], num_past: int, device: torch.device, kind: Backend) -> None:
    """lens: keys before the tree, and queries, of each request."""
    most = max(count for _, count in lens)
    gen = torch.Generator().manual_seed(len(lens))
    mask = torch.rand(len(lens), most, num_past + most, generator=gen) < 0.5
    counts = torch.tensor([count for _, count in lens])
    seq_lens = torch.tensor([first + num_past + count for first, count in lens])
    sizes = (counts * seq_lens + 7) // 8
    starts = (sizes.cumsum(0) - sizes).int()
    out = torch.full((int(sizes.sum()) + 3,), 0xA5, dtype=torch.uint8, device=device)
    to: list[Tensor] = [x.to(device) for x in (mask, counts, seq_lens, starts)]
    pack_tree_mask(to[0], to[1], to[2], to[3], out, int(sizes.max()), backend=kind)
    for request, (first, count) in enumerate(lens):
        seen = visible_BQK(
            torch.tensor([first]),
            torch.arange(first + num_past + count),
            torch.zeros(1, most, dtype=torch.int64),
            mask[request : request + 1],
            window=None,
        )
        expected = np.packbits(seen[0, :count].numpy().reshape(-1), bitorder="little")
        start = int(starts[request])
        np.testing.assert_array_equal(out[start : start + len(expected)].cpu().numpy(), expected)
    assert (out[-3:] == 0xA5).all()


RAGGED = [(11, 7), (0, 4), (25, 1), (3, 0), (500, 16)]


@pytest.mark.parametrize("num_past", [0, 3])
def test_ragged_trees(num_past: int, device: torch.device) -> None:
    check(RAGGED, num_past, device, "triton")


@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=4),
    num_past=st.integers(0, 4),
)
@settings(max_examples=40)
def test_any_lengths(lens: list[tuple[int, int]], num_past: int) -> None:
    check(lens, num_past, torch.device("cpu"), "torch")
