"""Which slots of which expert a Triton program takes, for all products of experts."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_of(ids, offsets, number, EVERY: tl.constexpr, ids_ptr):
    """The expert of program `number`, or -1 where another program has it."""
    if EVERY:
        expert = number
    else:
        expert = tl.load(ids_ptr + number)
        before = (ids == expert) & (offsets < number)
        expert = tl.where(tl.sum(before.to(tl.int32), axis=0) > 0, -1, expert)
    return expert


@triton.jit
def slots_of(is_hit, rank, offsets, start, ROWS: tl.constexpr):
    """The start-th and following slots among those that hit; 0 past the last."""
    wanted = start + tl.arange(0, ROWS)
    match = is_hit[None, :] & (rank[None, :] == wanted[:, None])
    return tl.sum(tl.where(match, offsets[None, :], 0), axis=1)


@triton.jit
def tile_of(order_ptr, tiles_ptr, tile, num_tiles, num_experts, ROWS: tl.constexpr):
    """Expert of a tile of sorted slots, its slots and which of them exist; expert is num_experts
    past the last tile, of which nothing else is written."""
    expert = tl.load(tiles_ptr + tile)
    is_known = expert < num_experts
    first = tl.where(is_known, tl.load(tiles_ptr + num_tiles + tile), 0)
    end = tl.where(is_known, tl.load(tiles_ptr + 2 * num_tiles + tile), 0)
    places = first + tl.arange(0, ROWS)
    is_slot = places < end
    return expert, tl.load(order_ptr + places, mask=is_slot, other=0), is_slot
