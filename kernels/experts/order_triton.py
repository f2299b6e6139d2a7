"""Slots sorted by expert, in tiles: a stable counting sort in two kernels."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch

_CHUNK = 128  # slots of a program, at most
_CELLS = 128 * 256  # slots x experts of a program, whose ranks take 4 bytes each of shared memory
_CHUNKS = 16  # whose counts are read at once


@dataclass(frozen=True)
class Order:
    """Slots of expert e are slots[starts[e] : starts[e + 1]], in rising order. Its tiles are those
    from tile_ends[e - 1], or 0, to tile_ends[e]."""

    slots: Tensor  # int32 [S]
    starts: Tensor  # int32 [E + 1]
    tile_ends: Tensor  # int32 [E]
    max_tiles: int  # that there can be, whatever was chosen


@triton.jit(do_not_specialize=["num_slots"])
def _count_kernel(
    ids_ptr,
    counts_ptr,
    num_slots,
    num_experts,
    DEPENDENT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """counts[c, e]: slots of expert e in chunk c."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    slots, e = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, BLOCK_E)
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    counts = tl.sum((ids[:, None] == e[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + chunk * num_experts + e, counts, mask=e < num_experts)


@triton.jit(do_not_specialize=["num_slots", "num_chunks"])
def _place_kernel(
    ids_ptr,
    counts_ptr,
    slots_ptr,
    starts_ptr,
    tile_ends_ptr,
    num_slots,
    num_chunks,
    num_experts,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    e, is_e = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_E) < num_experts
    before = tl.zeros((BLOCK_E,), dtype=tl.int32)
    total = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for c0 in range(0, num_chunks, CHUNKS):
        c = c0 + tl.arange(0, CHUNKS)
        counts = tl.load(
            counts_ptr + c[:, None] * num_experts + e[None, :],
            mask=(c < num_chunks)[:, None] & is_e[None, :],
            other=0,
        )
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((c < chunk)[:, None], counts, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    if chunk == 0:
        tiles = (total + TILE - 1) // TILE
        tl.store(tile_ends_ptr + e, tl.cumsum(tiles, axis=0), mask=is_e)
        tl.store(starts_ptr + 1 + e, ends, mask=is_e)
        tl.store(starts_ptr + e, 0, mask=e == 0)
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    is_own = ids[:, None] == e[None, :]
    rank = tl.cumsum(is_own.to(tl.int32), axis=0) - 1
    place = tl.sum(tl.where(is_own, rank + (ends - total + before)[None, :], 0), axis=1)
    tl.store(slots_ptr + place, slots, mask=slots < num_slots)


def order(ids: Tensor, num_experts: int, tile: int) -> Order:
    """ids: int32 [T, K], each below num_experts. tile: rows of one."""
    device, num_slots = ids.device, ids.numel()
    block_experts = triton.next_power_of_2(num_experts)
    chunk = min(_CHUNK, _CELLS // block_experts)
    num_chunks = triton.cdiv(num_slots, chunk)
    counts = torch.empty(num_chunks, num_experts, dtype=torch.int32, device=device)
    slots = torch.empty(num_slots, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tile_ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    dependent = has_dependent_launch(ids)
    options = {
        "DEPENDENT": dependent,
        "CHUNK": chunk,
        "BLOCK_E": block_experts,
        "num_warps": 8,
        **({"launch_pdl": True} if dependent else {}),
    }
    _count_kernel[(num_chunks,)](ids, counts, num_slots, num_experts, **options)
    _place_kernel[(num_chunks,)](
        ids,
        counts,
        slots,
        starts,
        tile_ends,
        num_slots,
        num_chunks,
        num_experts,
        TILE=tile,
        CHUNKS=_CHUNKS,
        **options,
    )
    max_tiles = num_slots // tile + min(num_experts, num_slots)
    return Order(slots, starts, tile_ends, max_tiles)
