"""Rows of a KV cache that may be FP8 (e4m3), for which PyTorch has few operators."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_MAX = 448.0


def write_rows(cache: Tensor, loc: Tensor, rows: Tensor) -> None:
    """cache[loc] = rows, rounded to the cache's type; what FP8 cannot hold is clipped.

    cache: [S, H, D]; loc: int64 [T], distinct but for slot 0; rows: [T, H, D] of any float type.
    """
    if cache.dtype != FP8:
        cache.index_copy_(0, loc, rows)
        return
    codes = rows.float().clamp(-_MAX, _MAX).to(FP8)
    cache.view(torch.uint8).index_copy_(0, loc, codes.view(torch.uint8))


def read_rows(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """cache[slots] in `dtype`: [S, H, D], int64 [K] -> [K, H, D]."""
    if cache.dtype != FP8:
        rows = cache.index_select(0, slots)
        return rows if rows.dtype is dtype else rows.to(dtype)
    return cache.view(torch.uint8).index_select(0, slots).view(FP8).to(dtype)
