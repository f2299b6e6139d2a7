"""Target-only acceptance in Triton: two launches a round, the path and the token behind it."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from specengine.kernels.accept.accept_chances_triton import Drafted, beside, coin
from specengine.kernels.accept.accept_round_triton import Round, offset_of
from specengine.kernels.accept.accept_sampled_triton import all_arrived, draw
from specengine.kernels.accept.types import Accepted, Draws, SampledRound


@triton.jit
def _end_of_path(chances, coins, parents, nodes, BLOCK_N: tl.constexpr):
    """The node from which the coin falls on no child. Parents: -1 of nodes without one."""
    end, child = -1, 0
    while child > end:  # parents come before children
        end = child
        mine = tl.where(parents == end, chances, 0.0)
        reached = tl.cumsum(mine, 0)
        # A sum taken in another order may grow at a token of chance 0.
        wins = (mine > 0.0) & (tl.sum(tl.where(nodes == end, coins, 0.0), 0) < reached)
        first = tl.min(tl.where(wins, nodes, BLOCK_N), 0)
        child = tl.where(first < BLOCK_N, first, end)
    return end


@triton.jit
def _walk_kernel(
    target_ptr, totals_ptr, draft_ptr, tokens_ptr, depths_ptr, roots_ptr, greedy_ptr, seeds_ptr,
    positions_ptr, lefts_ptr, parents_ptr, numbers_ptr, partials_ptr, missing_ptr, firsts_ptr,
    nexts_ptr, ends_ptr, counters_ptr, vocab, num_nodes, stride_target, stride_request, stride_node,
    HAS_NUMBERS: tl.constexpr, ACCEPT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Where the path ends, which children are there, and the mass of the target beside them. All
    programs of a request walk alike."""
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    first, root = request * num_nodes, tl.load(roots_ptr + request)
    tokens_ptr += first
    missing_ptr += first
    nexts_ptr += first
    nodes = tl.arange(0, BLOCK_N)
    depths = tl.load(depths_ptr + first + nodes, mask=nodes < num_nodes, other=-1)
    is_below = depths > 0
    parents = tl.load(parents_ptr + first + nodes, mask=is_below, other=-1)
    tokens = tl.load(tokens_ptr + nodes, mask=is_below, other=0)
    above = root + parents
    chances = tl.load(target_ptr + above * stride_target + tokens, mask=is_below, other=0.0)
    chances = chances.to(tl.float64) / tl.load(totals_ptr + above, mask=is_below, other=1.0)
    seed, position = tl.load(seeds_ptr + request), tl.load(positions_ptr + request)
    numbers = nodes
    if HAS_NUMBERS:
        numbers = tl.load(numbers_ptr + first + nodes, mask=nodes < num_nodes, other=0)
    coins = coin(seed, position, depths, numbers, ACCEPT)
    end = _end_of_path(chances, coins, parents, nodes, BLOCK_N)
    is_child = parents == end
    child = tl.min(tl.where(is_child, nodes, BLOCK_N), 0)
    child = tl.where(child < BLOCK_N, child, 0).to(tl.int64)
    is_later = is_child[None, :] & (nodes[None, :] > nodes[:, None])
    after = tl.min(tl.where(is_later, nodes[None, :], BLOCK_N), 1)
    after = tl.where(after < BLOCK_N, after, 0).to(tl.int64)
    # Each program stores the same, and reads what it stored itself.
    tl.store(nexts_ptr + nodes, after, mask=is_child)
    tl.debug_barrier()
    partials_ptr += request * splits
    if child > 0:
        row = root + end
        drafted = Drafted(draft_ptr, stride_node, 0, tokens_ptr, lefts_ptr, missing_ptr, nexts_ptr)
        left = beside(
            target_ptr + row * stride_target, tl.load(totals_ptr + row), drafted, child,
            split * BLOCK + tl.arange(0, BLOCK), vocab,
        )  # fmt: skip
        tl.store(partials_ptr + split, tl.sum(left, 0))
    if all_arrived(counters_ptr + request, splits):
        shares = tl.arange(0, BLOCK_S)
        mask = shares < tl.where(child > 0, splits, 0)
        sums = tl.load(partials_ptr + shares, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(ends_ptr + request, end.to(tl.int64))
        tl.store(firsts_ptr + first + end, child)
        tl.store(missing_ptr + child, tl.where(child > 0, tl.sum(sums, 0), 1.0))


def accept_target_only(drafts: SampledRound, draws: Draws) -> Accepted:
    round_ = Round.of(replace(drafts, draft_BNV=None), draws)
    round_.launch(
        _walk_kernel,
        (len(round_.ends_B), round_.splits),
        round_.drafts.parents_BN,
        round_.numbers_BN,
        round_.partials_BNS,
        round_.missing_BN,
        round_.firsts_BN,
        round_.nexts_BN,
        round_.ends_B,
        round_.counters_B,
        HAS_NUMBERS=drafts.numbers_BN is not None,
        ACCEPT=offset_of(draws.accept),
        **round_.blocks(),
    )
    return draw(round_, is_chain=False)
