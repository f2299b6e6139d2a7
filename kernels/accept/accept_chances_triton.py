"""Chances of drafted tokens, and what rejected ones leave of the target, in Triton."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from specengine.kernels.sample.keyed_uniform import LANE
from specengine.kernels.sample.sample_rows_triton import _uniform

_LANE = tl.constexpr(LANE)


class Drafted(NamedTuple):
    """What kernels read of a request's nodes; pointers are those of its first."""

    draft_ptr: Any
    stride_node: Any  # of the draft's rows
    vocab: Any  # of the draft's rows, 0 where a request reads none of them
    tokens_ptr: Any
    lefts_ptr: Any
    missing_ptr: Any
    nexts_ptr: Any


@triton.jit
def coin(seed, position, depth, node, OFFSET: tl.constexpr):
    """The uniform of a node, or of a vector of nodes; offset: of the stream."""
    return _uniform(seed, position + depth - 1 + node.to(tl.int64) * _LANE, OFFSET)


@triton.jit
def ratio(wanted, draft):
    """min(1, wanted / draft); of a draft of 0, whether anything is wanted."""
    quotient = wanted / tl.where(draft > 0.0, draft, 1.0)
    quotient = tl.where(draft > 0.0, quotient, (wanted > 0.0).to(tl.float64))
    return tl.minimum(quotient, 1.0)


@triton.jit
def drawn_from(draft_ptr, left, place, mask):
    """float64, a row of the draft over the mass that is left of it; 0 where the mask is off."""
    draft = tl.load(draft_ptr + place, mask=mask, other=0.0).to(tl.float64)
    return draft / tl.where(left > 0.0, left, 1.0)


@triton.jit
def left_over(target_ptr, total, scale, drafted, child, stop, place, vocab, IS_CHAIN: tl.constexpr):
    """What siblings from `child` up to `stop` have left of the target at some places, float64, and
    which of the places are their tokens. Scaled by the target's sum, and then by what was missing
    at each sibling; where nothing was, it is as before, or in a chain as it lay in memory."""
    raw = tl.load(target_ptr + place, mask=place < vocab, other=0.0).to(tl.float64)
    left = raw / total
    taken = place < 0
    while child != stop:
        mine = tl.load(drafted.lefts_ptr + child)
        mask = (place < drafted.vocab) & (taken == 0)
        row_ptr = drafted.draft_ptr + child * drafted.stride_node
        draft = drawn_from(row_ptr, mine, place, mask)
        missing = tl.load(drafted.missing_ptr + child)
        rest = tl.maximum(scale * left - draft, 0.0)
        rest = rest / tl.where(missing > 0.0, missing, 1.0)
        left = tl.where(missing > 0.0, rest, raw if IS_CHAIN else left)
        taken = taken | (place == tl.load(drafted.tokens_ptr + child))
        child = tl.load(drafted.nexts_ptr + child)
    return left, taken


@triton.jit
def beside(target_ptr, total, drafted, child, place, vocab):
    """float64, the target over its sum at some places, without the tokens of siblings from `child`
    on."""
    left = tl.load(target_ptr + place, mask=place < vocab, other=0.0).to(tl.float64) / total
    while child != 0:
        left = tl.where(place == tl.load(drafted.tokens_ptr + child), 0.0, left)
        child = tl.load(drafted.nexts_ptr + child)
    return left


@triton.jit
def missing_share(target_ptr, total, scale, draft_ptr, left, place, vocab, draft_vocab):
    """The mass of relu(scale * target - draft) at some places."""
    target = tl.load(target_ptr + place, mask=place < vocab, other=0.0).to(tl.float64) / total
    draft = drawn_from(draft_ptr, left, place, place < draft_vocab)
    return tl.sum(tl.maximum(scale * target - draft, 0.0), 0)


@triton.jit
def chain_chances(
    target_ptr, totals_ptr, draft_ptr, tokens_ptr, stride_target, stride_node, lefts, is_below,
    nodes, num_nodes, draft_vocab, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """float64, of each token of a chain by itself, min(1, target / draft), or of the whole path
    down to it, 1 for the root: p_i = min(1, p_{i-1} * target_i / draft_i). Pointers are those of
    the request's first node; nothing of nodes that do not exist is read."""
    tokens = tl.load(tokens_ptr + nodes, mask=is_below, other=0)
    above = nodes.to(tl.int64) - 1
    target = tl.load(target_ptr + above * stride_target + tokens, mask=is_below, other=0.0)
    target = target.to(tl.float64) / tl.load(totals_ptr + above, mask=is_below, other=1.0)
    place = nodes.to(tl.int64) * stride_node + tokens
    draft = drawn_from(draft_ptr, lefts, place, is_below & (tokens < draft_vocab))
    if not IS_WHOLE:
        chances = ratio(target, draft)
    else:
        chances = tl.where(nodes == 0, 1.0, target * 0.0)
        chance = tl.full([], 1.0, tl.float64)
        for node in range(1, num_nodes):
            is_here = nodes == node
            wanted = chance * tl.sum(tl.where(is_here, target, 0.0), 0)
            chance = ratio(wanted, tl.sum(tl.where(is_here, draft, 0.0), 0))
            chances = tl.where(is_here, chance, chances)
    return chances
