"""Slots sorted by expert, in tiles, stably: few by comparing each with all, in one kernel, more by
counting, in three."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.sizes import cdiv, power_of_2

_CHUNK = 128  # slots of a program, which a byte counts
_EXPERTS = 16  # whose counts a program adds up
_CHUNKS = 256  # of so many chunks at once
_MOST_COMPARED = 2048  # slots of which each is compared with all
_COMPARED = 16  # slots of a program that compares


@dataclass(frozen=True)
class Order:
    """Slots of one expert lie together, in rising order. Tile i takes places firsts[i] to ends[i]
    of slots, all of expert experts[i], which is E past the last tile. Those of expert e end before
    place stops[e]."""

    slots: Tensor  # int32 [S]
    tiles: Tensor  # int32 [3, T]: experts, firsts, ends; T can hold whatever is chosen
    stops: Tensor  # int32 [E]

    @property
    def max_tiles(self) -> int:
        return self.tiles.shape[1]


@triton.jit(do_not_specialize=["num_slots"])
def _count_kernel(
    ids_ptr,
    counts_ptr,
    totals_ptr,
    num_slots,
    num_experts,
    DEPENDENT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """counts[c, e]: slots of expert e in chunk c; totals[e], zeros before: in all."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    slots, e = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, BLOCK_E)
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=2147483647)
    counts = tl.histogram(ids, BLOCK_E, mask=slots < num_slots)
    tl.store(counts_ptr + chunk * num_experts + e, counts, mask=e < num_experts)
    tl.atomic_add(totals_ptr + e, counts, mask=(e < num_experts) & (counts > 0), sem="relaxed")


@triton.jit
def _store_tiles(
    total, tiles_ptr, stops_ptr, max_tiles, num_experts, TILE: tl.constexpr, BLOCK_E: tl.constexpr
):
    """total: slots of each expert."""
    e = tl.arange(0, BLOCK_E)
    stops = tl.cumsum(total, axis=0)
    tl.store(stops_ptr + e, stops, mask=e < num_experts)
    tiles = (total + TILE - 1) // TILE
    behind = tl.cumsum(tiles, axis=0)
    for number in range(tl.max(tiles, axis=0)):
        tile, first = behind - tiles + number, stops - total + number * TILE
        is_tile = number < tiles
        tl.store(tiles_ptr + tile, e, mask=is_tile)
        tl.store(tiles_ptr + max_tiles + tile, first, mask=is_tile)
        tl.store(tiles_ptr + 2 * max_tiles + tile, tl.minimum(first + TILE, stops), mask=is_tile)
    for start in range(tl.sum(tiles, axis=0), max_tiles, BLOCK_E):
        tl.store(tiles_ptr + start + e, num_experts, mask=start + e < max_tiles)


@triton.jit(do_not_specialize=["num_slots", "max_tiles"])
def _compare_kernel(
    ids_ptr,
    slots_ptr,
    tiles_ptr,
    stops_ptr,
    num_slots,
    max_tiles,
    num_experts,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The last program makes the tiles; each other places some slots."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    ids = tl.load(ids_ptr + s, mask=s < num_slots, other=2147483647)
    if program == tl.num_programs(0) - 1:
        total = tl.histogram(ids, BLOCK_E, mask=s < num_slots)
        _store_tiles(total, tiles_ptr, stops_ptr, max_tiles, num_experts, TILE, BLOCK_E)
    else:
        slots = program * OWN + tl.arange(0, OWN)
        own = tl.load(ids_ptr + slots, mask=slots < num_slots, other=0)
        is_same = (ids[None, :] == own[:, None]) & (s[None, :] < slots[:, None])
        is_before = (ids[None, :] < own[:, None]) | is_same
        place = tl.sum(is_before.to(tl.int32), axis=1)
        tl.store(slots_ptr + place, slots, mask=slots < num_slots)


@triton.jit(do_not_specialize=["num_chunks", "max_tiles"])
def _start_kernel(
    counts_ptr,
    totals_ptr,
    starts_ptr,
    tiles_ptr,
    stops_ptr,
    num_chunks,
    max_tiles,
    num_experts,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """starts[c, e]: the place of chunk c's first slot of expert e. The last program makes the
    tiles; each other has some experts."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    program, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    total = tl.load(totals_ptr + e, mask=e < num_experts, other=0)
    if program == tl.num_programs(0) - 1:
        _store_tiles(total, tiles_ptr, stops_ptr, max_tiles, num_experts, TILE, BLOCK_E)
    else:
        own = program * OWN + tl.arange(0, OWN)
        is_own = own < num_experts
        own_total = tl.load(totals_ptr + own, mask=is_own, other=0)
        next_place = tl.sum(tl.where(e < program * OWN, total, 0), axis=0)
        next_place += tl.cumsum(own_total, axis=0) - own_total
        for c0 in range(0, num_chunks, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            place = c[:, None] * num_experts + own[None, :]
            mask = (c < num_chunks)[:, None] & is_own[None, :]
            counts = tl.load(counts_ptr + place, mask=mask, other=0).to(tl.int32)
            starts = tl.cumsum(counts, axis=0) - counts + next_place[None, :]
            tl.store(starts_ptr + place, starts, mask=mask)
            next_place += tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["num_slots"])
def _place_kernel(
    ids_ptr,
    starts_ptr,
    slots_ptr,
    num_slots,
    num_experts,
    DEPENDENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    chunk, s = tl.program_id(0), tl.arange(0, CHUNK)
    slots = chunk * CHUNK + s
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    # By comparing each with all: a running sum for each expert would take far longer.
    is_before = (ids[None, :] == ids[:, None]) & (s[None, :] < s[:, None])
    start = tl.load(starts_ptr + chunk * num_experts + ids, mask=slots < num_slots, other=0)
    place = start + tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(slots_ptr + place, slots, mask=slots < num_slots)


def order(ids: Tensor, num_experts: int, tile: int) -> Order:
    """ids: int32 [T, K], each below num_experts. tile: rows of one."""
    device, num_slots = ids.device, ids.numel()
    max_tiles = num_slots // tile + min(num_experts, num_slots)
    found = Order(
        torch.empty(num_slots, dtype=torch.int32, device=device),
        torch.empty(3, max_tiles, dtype=torch.int32, device=device),
        torch.empty(num_experts, dtype=torch.int32, device=device),
    )
    dependent = has_dependent_launch(ids)
    options = {"DEPENDENT": dependent, **({"launch_pdl": True} if dependent else {})}
    if num_slots > _MOST_COMPARED:
        _by_counting(ids, found, num_experts, tile, options)
        return found
    _compare_kernel[(cdiv(num_slots, _COMPARED) + 1,)](
        ids,
        found.slots,
        found.tiles,
        found.stops,
        num_slots,
        max_tiles,
        num_experts,
        TILE=tile,
        OWN=_COMPARED,
        BLOCK_S=max(power_of_2(num_slots), 16),
        BLOCK_E=power_of_2(num_experts),
        num_warps=4,
        **options,
    )
    return found


def _by_counting(
    ids: Tensor, found: Order, num_experts: int, tile: int, options: dict[str, Any]
) -> None:
    num_slots, device = len(found.slots), ids.device
    num_chunks, block = cdiv(num_slots, _CHUNK), power_of_2(num_experts)
    counts = torch.empty(num_chunks, num_experts, dtype=torch.uint8, device=device)
    starts = torch.empty(num_chunks, num_experts, dtype=torch.int32, device=device)
    totals = torch.zeros(num_experts, dtype=torch.int32, device=device)
    _count_kernel[(num_chunks,)](
        ids,
        counts,
        totals,
        num_slots,
        num_experts,
        CHUNK=_CHUNK,
        BLOCK_E=block,
        num_warps=4,
        **options,
    )
    _start_kernel[(cdiv(num_experts, _EXPERTS) + 1,)](
        counts,
        totals,
        starts,
        found.tiles,
        found.stops,
        num_chunks,
        found.max_tiles,
        num_experts,
        TILE=tile,
        OWN=_EXPERTS,
        BLOCK_C=_CHUNKS,
        BLOCK_E=block,
        num_warps=8,
        **options,
    )
    _place_kernel[(num_chunks,)](
        ids, starts, found.slots, num_slots, num_experts, CHUNK=_CHUNK, num_warps=8, **options
    )
