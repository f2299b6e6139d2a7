"""How the parts of a product meet that several programs computed, in a fixed order."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.sizes import power_of_2

MAX_GROUPS = 16384  # tiles of outputs x rows that may be split


@dataclass(frozen=True)
class Tile:
    """Shape of one program: outputs, columns an iteration, parts of the columns, warps, and
    iterations whose loads are pending. The order of a row's sum follows from columns and splits:
    up to 64 rows they depend on the weight alone, never on the rows at hand. Of FP8 codes on both
    sides alone: rows of a program at most, and whether it has its part of the weight fetched while
    the kernel ahead runs."""

    outs: int
    columns: int
    splits: int
    warps: int
    stages: int
    rows: int = 64
    prefetches: bool = False


def counters_of(device: torch.device) -> Tensor:
    """int32 zeros, which every kernel leaves as zeros: of the current stream, beside which others
    may run the same kernels. A captured graph keeps those of the stream that it was captured on."""
    is_cuda = device.type == "cuda"
    return _counters(device, torch.cuda.current_stream(device).cuda_stream if is_cuda else 0)


@cache
def _counters(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(MAX_GROUPS, dtype=torch.int32, device=device)


def partials_of(splits: int, rows: int, outs: int, device: torch.device) -> Tensor:
    """float32 [splits, rows, outs]; hardly anything where nothing is split."""
    size = (splits, rows, outs) if splits > 1 else (1,)
    return torch.empty(size, dtype=torch.float32, device=device)


def rows_block(rows: int, most: int = 64) -> int:
    return max(16, min(power_of_2(rows), most))


@triton.jit
def store_part(sums, parts_ptr, outs, rows, num_outs, num_rows):
    """Write sums, float32 [outs, rows], of this program's share, at parts[share, rows, outs]."""
    cells = rows[None, :].to(tl.int64) * num_outs + outs[:, None]
    mask = (outs < num_outs)[:, None] & (rows < num_rows)[None, :]
    size = num_rows.to(tl.int64) * num_outs
    tl.store(parts_ptr + tl.program_id(2) * size + cells, sums, mask=mask)


@triton.jit
def store_sum(
    sums,  # float32 [outs, rows], of this program's share
    bias_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    outs,
    rows,
    num_outs,
    num_rows,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Write sums + bias at out[rows, outs]; of several shares the last to arrive does, and adds
    them in their order."""
    is_out, is_row = outs < num_outs, rows < num_rows
    cells = rows[None, :].to(tl.int64) * num_outs + outs[:, None]
    mask = is_out[:, None] & is_row[None, :]
    is_last = True
    if SPLITS > 1:
        store_part(sums, partial_ptr, outs, rows, num_outs, num_rows)
        size = num_rows.to(tl.int64) * num_outs
        counter = counters_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        # Every thread's stores must be out before the count says so.
        tl.debug_barrier()
        is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if is_last:
            tl.store(counter, 0)
            sums = tl.load(partial_ptr + cells, mask=mask, other=0.0, cache_modifier=".cg")
            for other in range(1, SPLITS):
                place = partial_ptr + other * size + cells
                sums += tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            sums += tl.load(bias_ptr + outs, mask=is_out, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + cells, sums.to(out_ptr.dtype.element_ty), mask=mask)
