from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from specengine.kernels.sample.apply_token_bitmask import apply_token_bitmask


def plain(logits: Tensor, words: Tensor, slots: Tensor) -> Tensor:
    """A token at a time."""
    out = logits.clone()
    for row, slot in enumerate(slots.tolist()):
        for token in range(logits.shape[1]):
            if slot >= 0 and not int(words[slot, token // 32]) >> token % 32 & 1:
                out[row, token] = float("-inf")
    return out


def case(rows: int, vocab: int, masks: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(rows + vocab)
    words = rng.integers(-(2**31), 2**31, (masks, (vocab + 31) // 32), dtype=np.int64)
    slots = rng.integers(0, masks, rows)
    slots[1::3] = -1
    torch.manual_seed(rows)
    return (
        torch.randn(rows, vocab),
        torch.from_numpy(words.astype(np.int32)),
        torch.from_numpy(slots.astype(np.int32)),
    )


@pytest.mark.parametrize(("rows", "vocab", "masks"), [(1, 5, 1), (7, 320, 3), (6, 77, 6)])
def test_reference(rows: int, vocab: int, masks: int) -> None:
    logits, words, slots = case(rows, vocab, masks)
    before = logits.clone()
    assert torch.equal(apply_token_bitmask(logits, words, slots), plain(logits, words, slots))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("rows", "vocab", "masks"), [(5, 320, 3), (3, 4100, 2), (0, 320, 1)])
def test_triton_equals_reference(rows: int, vocab: int, masks: int, device: torch.device) -> None:
    tensors = case(rows, vocab, masks)
    got = apply_token_bitmask(*(x.to(device) for x in tensors), backend="triton")
    assert torch.equal(got.cpu(), apply_token_bitmask(*tensors))
