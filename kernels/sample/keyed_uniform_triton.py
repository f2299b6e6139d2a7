"""Keyed uniforms in Triton: one launch, a lane a row."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.sample.keyed_uniform_ref import GOLDEN, MIX_1, MIX_2

_BLOCK = 256


@triton.jit
def _mix(x, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _keyed_uniform_kernel(
    seeds_ptr,
    positions_ptr,
    out_ptr,
    rows,
    OFFSET: tl.constexpr,
    GOLDEN: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds_ptr + row, mask=row < rows, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions_ptr + row, mask=row < rows, other=0).to(tl.uint64, bitcast=True)
    hashed = _mix(seed + OFFSET, MIX_1, MIX_2)
    hashed = _mix(hashed + position * GOLDEN, MIX_1, MIX_2)
    uniform = (hashed >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)
    tl.store(out_ptr + row, uniform, mask=row < rows)


def keyed_uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    out = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    rows = seeds.numel()
    if rows:
        offset = GOLDEN * (stream + 1) % 2**64
        _keyed_uniform_kernel[(triton.cdiv(rows, _BLOCK),)](
            seeds.contiguous(),
            positions.contiguous(),
            out,
            rows,
            offset,
            GOLDEN,
            MIX_1,
            MIX_2,
            BLOCK=_BLOCK,
        )
    return out
