"""Token-level rejection in Triton."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from specengine.kernels.accept.accept_chances_triton import coin, missing_share
from specengine.kernels.accept.accept_round_triton import offset_of
from specengine.kernels.accept.accept_sampled_triton import (
    all_arrived,
    begin,
    draw,
    read_of_draft,
    sum_partials,
)
from specengine.kernels.accept.types import Accepted, Draws, SampledRound


@triton.jit
def _reject_kernel(
    target_ptr, totals_ptr, draft_ptr, tokens_ptr, depths_ptr, roots_ptr, greedy_ptr, seeds_ptr,
    positions_ptr, lefts_ptr, chances_ptr, partials_ptr, missing_ptr, ends_ptr, counters_ptr, vocab,
    num_nodes, stride_target, stride_request, stride_node,
    ACCEPT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Where the path ends, and the mass of the residual there."""
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    first = request * num_nodes
    nodes = tl.arange(0, BLOCK_N)
    exists = nodes < num_nodes
    is_below = tl.load(depths_ptr + first + nodes, mask=exists, other=-1) > 0
    chances = tl.load(chances_ptr + first + nodes, mask=exists, other=0.0)
    seed, position = tl.load(seeds_ptr + request), tl.load(positions_ptr + request)
    # In a chain, a node's index is its depth.
    stands = is_below & (coin(seed, position, nodes, nodes, ACCEPT) < chances)
    falls = (nodes > 0) & (stands == 0)
    end = tl.min(tl.where(falls, nodes, BLOCK_N), 0).to(tl.int64) - 1
    child = end + 1
    is_child = is_below & (nodes == child)
    if tl.max(tl.where(is_child, 1, 0), 0) > 0:
        row = tl.load(roots_ptr + request) + end
        share = missing_share(
            target_ptr + row * stride_target, tl.load(totals_ptr + row), 1.0,
            draft_ptr + request * stride_request + child * stride_node,
            tl.load(lefts_ptr + first + child), split * BLOCK + tl.arange(0, BLOCK), vocab,
            read_of_draft(greedy_ptr + request, vocab),
        )  # fmt: skip
        tl.store(partials_ptr + first * splits + split, share)
    if all_arrived(counters_ptr + request, splits):
        tl.store(ends_ptr + request, end)
        # Of the request's shares the first row alone is taken.
        missing = sum_partials(partials_ptr, first + nodes * 0, is_child, splits, BLOCK_S)
        tl.store(missing_ptr + first + nodes, missing, mask=is_child)


def accept_rejection(drafts: SampledRound, draws: Draws) -> Accepted:
    round_ = begin(drafts, draws, is_chain=True)
    round_.launch(
        _reject_kernel,
        (len(round_.ends_B), round_.splits),
        round_.chances_BN,
        round_.partials_BNS,
        round_.missing_BN,
        round_.ends_B,
        round_.counters_B,
        ACCEPT=offset_of(draws.accept),
        **round_.blocks(),
    )
    return draw(round_, is_chain=True)
