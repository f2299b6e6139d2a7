"""Places of new tokens in Triton: a program a request."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.kv.types import RowPlaces


@triton.jit(do_not_specialize=["offset"])
def _row_places_kernel(
    table_ptr,
    rows_ptr,
    lens_ptr,
    depths_ptr,
    positions_ptr,
    slots_ptr,
    seq_lens_ptr,
    stride_table,
    context,
    width,
    offset,
    HAS_DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    steps = tl.arange(0, BLOCK)
    length = tl.load(lens_ptr + request)
    first = length + offset
    places = first + steps
    mask = steps < width
    row = table_ptr + tl.load(rows_ptr + request) * stride_table
    slots = tl.load(row + places, mask=mask & (places < context), other=0).to(tl.int64)
    out = request.to(tl.int64) * width + steps
    positions = places
    if HAS_DEPTHS:
        positions = length + tl.load(depths_ptr + out, mask=mask, other=0)
    tl.store(positions_ptr + out, tl.minimum(positions, context - 1), mask=mask)
    tl.store(slots_ptr + out, slots, mask=mask)
    tl.store(seq_lens_ptr + request, first + width)


def row_places(
    req_to_token: Tensor,
    rows_B: Tensor,
    lens_B: Tensor,
    width: int,
    offset: int,
    depths_T: Tensor | None,
) -> RowPlaces:
    requests = rows_B.shape[0]
    positions = torch.empty(requests * width, dtype=torch.int64, device=rows_B.device)
    slots, seq_lens = torch.empty_like(positions), torch.empty_like(rows_B)
    _row_places_kernel[(requests,)](
        req_to_token,
        rows_B,
        lens_B,
        rows_B if depths_T is None else depths_T,
        positions,
        slots,
        seq_lens,
        req_to_token.stride(0),
        req_to_token.shape[1],
        width,
        offset,
        HAS_DEPTHS=depths_T is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
    return RowPlaces(positions, slots, seq_lens)
