"""Recursive rejection in Triton: a program a request goes down its tree.

The vocabulary is passed over once for each rejected child, in blocks. What is left of the target
is not kept: it is worked out again from the rows of the siblings rejected before.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from specengine.kernels.accept.accept_chances_triton import (
    Drafted,
    coin,
    drawn_from,
    left_over,
    ratio,
)
from specengine.kernels.accept.accept_round_triton import offset_of
from specengine.kernels.accept.accept_sampled_triton import begin, draw, read_of_draft
from specengine.kernels.accept.types import Accepted, Draws, SampledRound


@triton.jit
def _contest(target_ptr, total, drafted, first_child, child, place, vocab):
    """What is left of the target for a child after those before it, and the child's own row."""
    target, taken = left_over(
        target_ptr, total, 1.0, drafted, first_child, child, place, vocab, False
    )
    mask = (place < drafted.vocab) & (taken == 0)
    left = tl.load(drafted.lefts_ptr + child)
    row_ptr = drafted.draft_ptr + child * drafted.stride_node
    return target, drawn_from(row_ptr, left, place, mask)


@triton.jit
def _missing(target_ptr, total, drafted, first_child, child, vocab, BLOCK: tl.constexpr):
    """The mass that is left of the target once the child is rejected as well."""
    missing = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        target, draft = _contest(target_ptr, total, drafted, first_child, child, place, vocab)
        missing += tl.maximum(target - draft, 0.0)
    return tl.sum(missing, 0)


@triton.jit
def _descend_kernel(
    target_ptr, totals_ptr, draft_ptr, tokens_ptr, depths_ptr, roots_ptr, greedy_ptr, seeds_ptr,
    positions_ptr, lefts_ptr, numbers_ptr, missing_ptr, firsts_ptr, nexts_ptr, ends_ptr, vocab,
    num_nodes, stride_target, stride_request, stride_node,
    HAS_NUMBERS: tl.constexpr, ACCEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    first, root = request * num_nodes, tl.load(roots_ptr + request)
    draft_vocab = read_of_draft(greedy_ptr + request, vocab)
    seed, position = tl.load(seeds_ptr + request), tl.load(positions_ptr + request)
    draft_ptr += request * stride_request
    tokens_ptr += first
    depths_ptr += first
    numbers_ptr += first
    lefts_ptr += first
    missing_ptr += first
    firsts_ptr += first
    nexts_ptr += first
    drafted = Drafted(
        draft_ptr, stride_node, draft_vocab, tokens_ptr, lefts_ptr, missing_ptr, nexts_ptr
    )
    end = tl.zeros([], tl.int64)
    first_child = tl.load(firsts_ptr)
    child = first_child
    while child > 0:
        row_ptr = target_ptr + (root + end) * stride_target
        total = tl.load(totals_ptr + root + end)
        token = tl.load(tokens_ptr + child) + tl.zeros([1], tl.int64)
        target, draft = _contest(row_ptr, total, drafted, first_child, child, token, vocab)
        chance = ratio(tl.sum(target, 0), tl.sum(draft, 0))
        number = child
        if HAS_NUMBERS:
            number = tl.load(numbers_ptr + child)
        if coin(seed, position, tl.load(depths_ptr + child), number, ACCEPT) < chance:
            end = child
            first_child = tl.load(firsts_ptr + child)
            child = first_child
        else:
            missing = _missing(row_ptr, total, drafted, first_child, child, vocab, BLOCK)
            tl.store(missing_ptr + child, missing)
            tl.debug_barrier()  # other threads of the program read what one wrote
            child = tl.load(nexts_ptr + child)
    tl.store(ends_ptr + request, end)


def accept_sibling(drafts: SampledRound, draws: Draws) -> Accepted:
    round_ = begin(drafts, draws, is_chain=False)
    round_.launch(
        _descend_kernel,
        (len(round_.ends_B),),
        round_.numbers_BN,
        round_.missing_BN,
        round_.firsts_BN,
        round_.nexts_BN,
        round_.ends_B,
        HAS_NUMBERS=drafts.numbers_BN is not None,
        ACCEPT=offset_of(draws.accept),
        BLOCK=round_.block,
        num_warps=max(1, min(16, round_.block // 256)),
    )
    return draw(round_, is_chain=False)
