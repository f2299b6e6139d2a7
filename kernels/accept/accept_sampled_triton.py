"""What the rules for sampled drafts have in common, in Triton: three launches a round.

1. `begin` sums up the draft's rows, a share of the vocabulary a program, and then gives the chances
   that the rules for chains begin with.
2. The rule's own kernel finds where each path ends, and the mass of the residual there.
3. `draw` takes the token after each path, a share of the vocabulary a program.

A rule that reads no draft begins with the second.

Programs of a request meet at a counter: the last to arrive finds what the others left, and does
what needs all of it. Sums are taken in the same order every time.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specengine.kernels.accept.accept_chances_triton import (
    Drafted,
    beside,
    chain_chances,
    left_over,
)
from specengine.kernels.accept.accept_round_triton import Round, offset_of
from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from specengine.kernels.sample.sample_rows_ref import WEIGHT_BITS
from specengine.kernels.sample.sample_rows_triton import _uniform

_UNIT = tl.constexpr(2.0**WEIGHT_BITS)


@triton.jit
def read_of_draft(greedy_ptr, vocab):
    """How much of its draft's rows a request reads: all or nothing."""
    return tl.where(tl.load(greedy_ptr) == 0, vocab, 0)


@triton.jit
def all_arrived(counter_ptr, number):
    """True for the last of so many programs, which finds what the others have stored; to be read
    past this multiprocessor's first-level cache (".cg")."""
    # Every thread's stores must be out before the count says so.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == number - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def sum_partials(partials_ptr, rows, is_row, splits, BLOCK_S: tl.constexpr):
    """float64, of each row's shares."""
    share = tl.arange(0, BLOCK_S)
    mask = is_row[:, None] & (share < splits)[None, :]
    place = partials_ptr + rows[:, None] * splits + share[None, :]
    return tl.sum(tl.load(place, mask=mask, other=0.0, cache_modifier=".cg"), 1)


@triton.jit
def _begin_kernel(
    target_ptr, totals_ptr, draft_ptr, tokens_ptr, parents_ptr, depths_ptr, roots_ptr, greedy_ptr,
    partials_ptr, lefts_ptr, chances_ptr, firsts_ptr, nexts_ptr, counters_ptr, vocab, num_nodes,
    stride_target, stride_request, stride_node, IS_CHAIN: tl.constexpr, IS_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Mass of each draft row without the tokens of earlier siblings, and which follows which; of
    chains the chances as well."""
    row, splits = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    request = row // num_nodes
    node = row - request * num_nodes
    tokens_ptr += request * num_nodes
    parents_ptr += request * num_nodes
    depths_ptr += request * num_nodes
    nodes = tl.arange(0, BLOCK_N)
    exists = nodes < num_nodes
    is_below = tl.load(depths_ptr + nodes, mask=exists, other=-1) > 0
    parents = tl.load(parents_ptr + nodes, mask=exists, other=-1)
    depth, parent = tl.load(depths_ptr + node), tl.load(parents_ptr + node)
    if tl.program_id(1) == 0:
        first = tl.min(tl.where(is_below & (parents == node), nodes, BLOCK_N), 0)
        is_later = is_below & (parents == tl.where(depth > 0, parent, -2)) & (nodes > node)
        after = tl.min(tl.where(is_later, nodes, BLOCK_N), 0)
        tl.store(firsts_ptr + row, tl.where(first < BLOCK_N, first, 0).to(tl.int64))
        tl.store(nexts_ptr + row, tl.where(after < BLOCK_N, after, 0).to(tl.int64))
    share = tl.zeros([], tl.float64)
    if (depth > 0) & (tl.load(greedy_ptr + request) == 0):
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row_ptr = draft_ptr + request * stride_request + node * stride_node
        draft = tl.load(row_ptr + place, mask=place < vocab, other=0.0).to(tl.float64)
        if not IS_CHAIN:
            for other in range(1, num_nodes):
                is_sibling = (tl.load(parents_ptr + other) == parent) & (other < node)
                if is_sibling & (tl.load(depths_ptr + other) > 0):
                    draft = tl.where(place == tl.load(tokens_ptr + other), 0.0, draft)
        share = tl.sum(draft, 0)
    tl.store(partials_ptr + row * splits + tl.program_id(1), share)
    if all_arrived(counters_ptr + request, num_nodes * splits):
        rows = request * num_nodes + nodes
        lefts = sum_partials(partials_ptr, rows, exists, splits, BLOCK_S)
        tl.store(lefts_ptr + rows, lefts, mask=exists)
        if IS_CHAIN:
            root = tl.load(roots_ptr + request)
            chances = chain_chances(
                target_ptr + root * stride_target, totals_ptr + root,
                draft_ptr + request * stride_request, tokens_ptr, stride_target, stride_node,
                lefts, is_below, nodes, num_nodes, read_of_draft(greedy_ptr + request, vocab),
                IS_WHOLE,
            )  # fmt: skip
            tl.store(chances_ptr + rows, chances, mask=exists)


@triton.jit
def _weights(
    target_ptr, total, scale, drafted, child, place, vocab, IS_CHAIN: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """float64, what the token after a path is drawn from, at some places."""
    if HAS_DRAFT:
        none = tl.zeros([], tl.int64)
        left, _ = left_over(target_ptr, total, scale, drafted, child, none, place, vocab, IS_CHAIN)
    else:
        missing = tl.load(drafted.missing_ptr + child)
        is_left = missing > 0.0
        # Of a target that says children's tokens alone, nothing is left but rounding: it speaks.
        total, child = tl.where(is_left, total, 1.0), tl.where(is_left, child, 0)
        left = beside(target_ptr, total, drafted, child, place, vocab)
        left = left / tl.where(is_left, missing, 1.0)
    return left


@triton.jit
def _draw_kernel(
    target_ptr, totals_ptr, draft_ptr, tokens_ptr, depths_ptr, roots_ptr, greedy_ptr, seeds_ptr,
    positions_ptr, lefts_ptr, missing_ptr, firsts_ptr, nexts_ptr, ends_ptr, scales_ptr, weights_ptr,
    counters_ptr, out_ptr, vocab, num_nodes, stride_target, stride_request, stride_node,
    IS_CHAIN: tl.constexpr, HAS_DRAFT: tl.constexpr, RESIDUAL: tl.constexpr, SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """As sample_rows_ref.invert_cdf draws."""
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    first = request * num_nodes
    end = tl.load(ends_ptr + request)
    child = tl.load(firsts_ptr + first + end)
    row = tl.load(roots_ptr + request) + end
    # Where nothing was drafted, weights are those that plain decoding samples from.
    total = tl.where(child == 0, 1.0, tl.load(totals_ptr + row))
    scale = tl.load(scales_ptr + request)
    draft_vocab = read_of_draft(greedy_ptr + request, vocab)
    target_ptr += row * stride_target
    draft_ptr += request * stride_request
    tokens_ptr += first
    lefts_ptr += first
    missing_ptr += first
    nexts_ptr += first
    drafted = Drafted(
        draft_ptr, stride_node, draft_vocab, tokens_ptr, lefts_ptr, missing_ptr, nexts_ptr
    )
    place = split * BLOCK + tl.arange(0, BLOCK)
    left = _weights(target_ptr, total, scale, drafted, child, place, vocab, IS_CHAIN, HAS_DRAFT)
    weights_ptr += request * splits
    tl.store(weights_ptr + split, tl.sum((left * _UNIT).to(tl.int64), 0))
    if all_arrived(counters_ptr + request, splits):
        shares = tl.arange(0, BLOCK_S)
        weights = tl.load(weights_ptr + shares, mask=shares < splits, other=0, cache_modifier=".cg")
        sum_ = tl.sum(weights, 0)
        seed = tl.load(seeds_ptr + request)
        position = tl.load(positions_ptr + request) + tl.load(depths_ptr + first + end)
        uniform = tl.where(
            child == 0, _uniform(seed, position, SAMPLE), _uniform(seed, position, RESIDUAL)
        )
        target = tl.minimum((uniform * sum_.to(tl.float64)).to(tl.int64), sum_ - 1)
        reached = tl.cumsum(weights, 0)
        chosen = tl.min(tl.where(reached > target, shares, splits - 1), 0)
        before = tl.sum(tl.where(shares < chosen, weights, 0), 0)
        place = chosen * BLOCK + tl.arange(0, BLOCK)
        left = _weights(target_ptr, total, scale, drafted, child, place, vocab, IS_CHAIN, HAS_DRAFT)
        reached = before + tl.cumsum((left * _UNIT).to(tl.int64), 0)
        token = tl.min(tl.where(reached > target, place, vocab - 1), 0)
        tl.store(out_ptr + request, tl.minimum(token, vocab - 1).to(tl.int64))


def begin(drafts: SampledRound, draws: Draws, *, is_chain: bool, is_whole: bool = False) -> Round:
    round_ = Round.of(drafts, draws)
    drafts = round_.drafts
    _begin_kernel[(round_.lefts_BN.numel(), round_.splits)](
        drafts.target_TV,
        drafts.target_sum_T,
        round_.draft_BNV,
        drafts.tokens_BN,
        drafts.parents_BN,
        drafts.depths_BN,
        drafts.roots_B,
        round_.greedy_B,
        round_.partials_BNS,
        round_.lefts_BN,
        round_.chances_BN,
        round_.firsts_BN,
        round_.nexts_BN,
        round_.counters_B,
        *round_.sizes(),
        IS_CHAIN=is_chain,
        IS_WHOLE=is_whole,
        **round_.blocks(),
        enable_fp_fusion=False,
    )
    return round_


def draw(round_: Round, *, is_chain: bool) -> Accepted:
    tokens_B = torch.empty_like(round_.ends_B)
    blocks = round_.blocks()
    del blocks["BLOCK_N"]
    round_.launch(
        _draw_kernel,
        (len(tokens_B), round_.splits),
        round_.missing_BN,
        round_.firsts_BN,
        round_.nexts_BN,
        round_.ends_B,
        round_.scales_B,
        round_.partials_BNS.view(torch.int64),
        round_.counters_B,
        tokens_B,
        IS_CHAIN=is_chain,
        HAS_DRAFT=round_.drafts.draft_BNV is not None,
        RESIDUAL=offset_of(round_.draws.residual),
        SAMPLE=offset_of(round_.draws.sample),
        **blocks,
    )
    return Accepted(round_.ends_B, tokens_B)
