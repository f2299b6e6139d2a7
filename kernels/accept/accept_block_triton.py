"""Block verification in Triton."""

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
def _judge_block_kernel(
    target_ptr, totals_ptr, draft_ptr, tokens_ptr, depths_ptr, roots_ptr, greedy_ptr, seeds_ptr,
    positions_ptr, lefts_ptr, path_ptr, partials_ptr, missing_ptr, ends_ptr, scales_ptr,
    counters_ptr, vocab, num_nodes, stride_target, stride_request, stride_node,
    ACCEPT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The mass of the residual at every node; then where the path ends."""
    row, splits = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    request = row // num_nodes
    node = row - request * num_nodes
    first = request * num_nodes
    child = node + 1
    share = tl.zeros([], tl.float64)
    if tl.load(depths_ptr + row + 1, mask=child < num_nodes, other=-1) > 0:
        target_row = tl.load(roots_ptr + request) + node
        share = missing_share(
            target_ptr + target_row * stride_target, tl.load(totals_ptr + target_row),
            tl.load(path_ptr + row), draft_ptr + request * stride_request + child * stride_node,
            tl.load(lefts_ptr + row + 1), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), vocab,
            read_of_draft(greedy_ptr + request, vocab),
        )  # fmt: skip
    tl.store(partials_ptr + row * splits + tl.program_id(1), share)
    if all_arrived(counters_ptr + request, num_nodes * splits):
        nodes = tl.arange(0, BLOCK_N)
        exists, goes_on = nodes < num_nodes, nodes + 1 < num_nodes
        path = tl.load(path_ptr + first + nodes, mask=exists, other=0.0)
        missing = sum_partials(partials_ptr, first + nodes, goes_on, splits, BLOCK_S)
        tl.store(missing_ptr + first + nodes + 1, missing, mask=goes_on)
        is_below = tl.load(depths_ptr + first + nodes, mask=exists, other=-1) > 0
        goes_on = tl.load(depths_ptr + first + nodes + 1, mask=goes_on, other=-1) > 0
        either = missing + 1.0 - path
        chance = tl.where(either > 0.0, missing / tl.where(either > 0.0, either, 1.0), 1.0)
        # In a chain, a node's index is its depth.
        seed, position = tl.load(seeds_ptr + request), tl.load(positions_ptr + request)
        coins = coin(seed, position, nodes, nodes, ACCEPT)
        stands = is_below & (coins < tl.where(goes_on, chance, path))
        end = tl.max(tl.where(stands, nodes, 0), 0)
        tl.store(ends_ptr + request, end.to(tl.int64))
        tl.store(scales_ptr + request, tl.sum(tl.where(nodes == end, path, 0.0), 0))


def accept_block(drafts: SampledRound, draws: Draws) -> Accepted:
    round_ = begin(drafts, draws, is_chain=True, is_whole=True)
    round_.launch(
        _judge_block_kernel,
        (round_.lefts_BN.numel(), round_.splits),
        round_.chances_BN,
        round_.partials_BNS,
        round_.missing_BN,
        round_.ends_B,
        round_.scales_B,
        round_.counters_B,
        ACCEPT=offset_of(draws.accept),
        **round_.blocks(),
    )
    return draw(round_, is_chain=True)
