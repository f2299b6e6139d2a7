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
def tile_of(
    order_ptr, ends_ptr, starts_ptr, tile, num_experts, BLOCK_E: tl.constexpr, ROWS: tl.constexpr
):
    """Expert of a tile of sorted slots, its slots and which of them exist; expert is num_experts
    past the last tile."""
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + e, mask=e < num_experts, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    first = tl.max(tl.where(ends <= tile, ends, 0), axis=0)
    known = tl.minimum(expert, num_experts - 1)
    start = tl.load(starts_ptr + known)
    end = tl.where(expert < num_experts, tl.load(starts_ptr + known + 1), start)
    places = start + (tile - first) * ROWS + tl.arange(0, ROWS)
    is_slot = places < end
    return expert, tl.load(order_ptr + places, mask=is_slot, other=0), is_slot
