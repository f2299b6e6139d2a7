"""The largest value of each row in Triton: programs share a row, and meet at a maximum."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.head.types import Meeting

_MIN_SHARE, _MAX_SHARE = 2048, 8192  # columns of one program


@triton.jit
def _row_argmax_kernel(
    x_ptr, ids_ptr, keys_ptr, counters_ptr, out_ptr, num_cols, stride_x,
    HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = x_ptr + row.to(tl.int64) * stride_x + cols
    x = tl.load(place, mask=cols < num_cols, other=float("-inf")).to(tl.float32)
    best, at = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    # A key orders as the value does, and prefers the first column among equals. Keys are above 0.
    bits = (best + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    ordered = tl.where(bits < 0, -1 - bits, bits + 0x80000000)
    column = (tl.program_id(1) * BLOCK + at).to(tl.int64)
    key = (ordered << 31) | (0x7FFFFFFF - column)
    tl.atomic_max(keys_ptr + row, key, sem="release", scope="gpu")
    arrived = tl.atomic_add(counters_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(1) - 1:
        # Read by an atomic: other multiprocessors wrote it.
        found = tl.atomic_xchg(keys_ptr + row, tl.zeros([], tl.int64), sem="acquire", scope="gpu")
        token = 0x7FFFFFFF - (found & 0x7FFFFFFF)
        if HAS_IDS:
            token = tl.load(ids_ptr + token)
        tl.store(out_ptr + row, token)
        tl.store(counters_ptr + row, 0)


def row_argmax(x_RV: Tensor, meeting: Meeting, ids: Tensor | None) -> Tensor:
    rows, cols = x_RV.shape
    out = torch.empty(rows, dtype=torch.int64, device=x_RV.device)
    if rows == 0:
        return out
    block = _MIN_SHARE if rows <= 8 else _MAX_SHARE
    _row_argmax_kernel[(rows, triton.cdiv(cols, block))](
        x_RV,
        ids if ids is not None else out,
        meeting.keys,
        meeting.counters,
        out,
        cols,
        x_RV.stride(0),
        HAS_IDS=ids is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out
