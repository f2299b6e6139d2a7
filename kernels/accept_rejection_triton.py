"""Token-level rejection in Triton."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from specengine.kernels.accept_sampled import Accepted, Draws, SampledRound
from specengine.kernels.accept_sampled_triton import (
    begin,
    coin,
    draw,
    drawn_from,
    everybody_came,
    offset_of,
    ratio,
    read_of_draft,
    shares_sum,
)


@triton.jit
def chain_probs(
    target_ptr, totals_ptr, draft_ptr, tokens_ptr, depths_ptr, lefts_ptr, draft_vocab,
    stride_target, stride_node, nodes, num_nodes,
):  # fmt: skip
    """Which nodes exist below the root, and what the target and the draft say of their tokens,
    float64, 0 elsewhere. Pointers are those of the request's first node."""
    exists = nodes < num_nodes
    is_below = tl.load(depths_ptr + nodes, mask=exists, other=-1) > 0
    tokens = tl.load(tokens_ptr + nodes, mask=is_below, other=0)
    above = nodes.to(tl.int64) - 1
    target = tl.load(target_ptr + above * stride_target + tokens, mask=is_below, other=0.0)
    target = target.to(tl.float64) / tl.load(totals_ptr + above, mask=is_below, other=1.0)
    left = tl.load(lefts_ptr + nodes, mask=exists, other=0.0)
    place = nodes.to(tl.int64) * stride_node + tokens
    draft = drawn_from(draft_ptr, left, place, is_below & (tokens < draft_vocab))
    return is_below, target, draft


@triton.jit
def missing_share(target_ptr, total, scale, draft_ptr, left, place, vocab, draft_vocab):
    """The mass of relu(scale * target - draft) at some places."""
    target = tl.load(target_ptr + place, mask=place < vocab, other=0.0).to(tl.float64) / total
    draft = drawn_from(draft_ptr, left, place, place < draft_vocab)
    return tl.sum(tl.maximum(scale * target - draft, 0.0), 0)


@triton.jit
def _reject_kernel(
    target_ptr, totals_ptr, draft_ptr, tokens_ptr, depths_ptr, roots_ptr, greedy_ptr, seeds_ptr,
    positions_ptr, lefts_ptr, shares_ptr, missing_ptr, ends_ptr, counters_ptr, vocab, num_nodes,
    stride_target, stride_request, stride_node,
    ACCEPT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Where the path ends, and the mass of the residual there."""
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    first, root = request * num_nodes, tl.load(roots_ptr + request)
    draft_vocab = read_of_draft(greedy_ptr + request, vocab)
    target_ptr += root * stride_target
    draft_ptr += request * stride_request
    nodes = tl.arange(0, BLOCK_N)
    is_below, target, draft = chain_probs(
        target_ptr, totals_ptr + root, draft_ptr, tokens_ptr + first, depths_ptr + first,
        lefts_ptr + first, draft_vocab, stride_target, stride_node, nodes, num_nodes,
    )  # fmt: skip
    # In a chain, a node's index is its depth.
    seed, position = tl.load(seeds_ptr + request), tl.load(positions_ptr + request)
    stands = coin(seed, position, nodes, nodes, ACCEPT) < ratio(target, draft)
    falls = (nodes > 0) & ((stands & is_below) == 0)
    end = tl.min(tl.where(falls, nodes, BLOCK_N), 0).to(tl.int64) - 1
    child = end + 1
    has_child = tl.max(tl.where(is_below & (nodes == child), 1, 0), 0)
    if has_child > 0:
        share = missing_share(
            target_ptr + end * stride_target, tl.load(totals_ptr + root + end), 1.0,
            draft_ptr + child * stride_node, tl.load(lefts_ptr + first + child),
            split * BLOCK + tl.arange(0, BLOCK), vocab, draft_vocab,
        )  # fmt: skip
        tl.store(shares_ptr + first * splits + split, share)
    if everybody_came(counters_ptr + request, splits):
        tl.store(ends_ptr + request, end)
        mask = (nodes == child) & is_below
        # Of the request's shares the first row alone is taken.
        missing = shares_sum(shares_ptr, first + nodes * 0, mask, splits, BLOCK_S)
        tl.store(missing_ptr + first + nodes, missing, mask=mask)


def accept_rejection(drafts: SampledRound, draws: Draws) -> Accepted:
    round_ = begin(drafts, draws, has_siblings=False)
    _reject_kernel[(len(drafts.roots_B), round_.splits)](
        drafts.target_TV,
        drafts.target_sum_T,
        round_.draft_BNV,
        drafts.tokens_BN,
        drafts.depths_BN,
        drafts.roots_B,
        round_.greedy_B,
        draws.seeds_B,
        draws.positions_B,
        round_.lefts_BN,
        round_.shares_BNS,
        round_.missing_BN,
        round_.ends_B,
        round_.counters_B,
        drafts.target_TV.shape[1],
        drafts.tokens_BN.shape[1],
        *round_.strides(),
        ACCEPT=offset_of(draws.accept),
        **round_.blocks(),
        enable_fp_fusion=False,
    )
    return draw(round_, is_chain=True)
