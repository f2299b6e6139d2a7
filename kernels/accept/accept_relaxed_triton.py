"""Relaxed acceptance in Triton, in one launch: programs of a request share its rows, and the last
of them to be done walks.

A row is read only where it decides: where there are children, and none carries the target's token.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specengine.kernels.accept.accept_sampled_triton import all_arrived
from specengine.kernels.accept.types import Accepted, RelaxedRound

_MAX_BLOCK = 4096  # of the vocabulary, a program


@triton.jit
def _first(which, nodes, BLOCK_N: tl.constexpr):
    """BLOCK_N where there is none."""
    return tl.min(tl.where(which, nodes, BLOCK_N), 0)


@triton.jit
def _weigh(
    row_ptr, tokens_ptr, above_ptr, share_ptr, is_child, nodes, split, vocab,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Leave the maximum and the sum of exponentials of this program's part of a row, and count what
    lies above the token of each child."""
    place = split * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
    largest = tl.max(logits, 0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(share_ptr, largest.to(tl.float64))
    tl.store(share_ptr + 1, tl.sum(tl.exp(logits.to(tl.float64) - finite), 0))
    child = _first(is_child, nodes, BLOCK_N)
    while child < BLOCK_N:
        token = tl.load(tokens_ptr + child)
        is_token = (token >= 0) & (token < vocab)
        mine = tl.load(row_ptr + token, mask=is_token, other=float("-inf")).to(tl.float32)
        number = tl.sum((logits > mine).to(tl.int32), 0)
        tl.atomic_add(above_ptr + child, number, sem="relaxed", scope="gpu")
        child = _first(is_child & (nodes > child), nodes, BLOCK_N)


@triton.jit
def _is_near(logits, share_ptr, splits, delta, BLOCK_S: tl.constexpr):
    """Whether tokens of these logits have a probability in a row, and one at most delta below the
    best one's. Means nothing where there are no splits."""
    places = tl.arange(0, BLOCK_S)
    mask = places < splits
    # Written by other multiprocessors: not to be read through this one's first-level cache.
    cells = share_ptr + 2 * places
    largest = tl.load(cells, mask=mask, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(cells + 1, mask=mask, other=0.0, cache_modifier=".cg")
    best = tl.max(largest, 0)
    finite = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(sums * tl.exp(largest - finite), 0)
    total = tl.where(total > 0.0, total, 1.0)
    # No logit of the row lies above the best; those of other rows are not asked for.
    probs = tl.exp(tl.minimum(logits - finite, 0.0)) / total
    return (probs > 0.0) & (probs >= 1.0 / total - delta)


@triton.jit
def _accept_relaxed_kernel(
    logits_ptr, chosen_ptr, tokens_ptr, parents_ptr, counts_ptr, roots_ptr, partials_ptr, above_ptr,
    ends_ptr, out_ptr, vocab, num_nodes, stride_logits, top_k, delta,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    request, splits = tl.program_id(0).to(tl.int64), tl.num_programs(2)
    node, split = tl.program_id(1), tl.program_id(2)
    first, root = request * num_nodes, tl.load(roots_ptr + request)
    logits_ptr += root * stride_logits
    chosen_ptr += root
    tokens_ptr += first
    parents_ptr += first
    above_ptr += first
    partials_ptr += first * splits * 2
    count = tl.load(counts_ptr + request)
    nodes = tl.arange(0, BLOCK_N)
    is_below = (nodes > 0) & (nodes < count)
    tokens = tl.load(tokens_ptr + nodes, mask=is_below, other=-1)
    parents = tl.load(parents_ptr + nodes, mask=is_below, other=-1)
    chosen = tl.load(chosen_ptr + node, mask=node < count, other=0)
    is_child = parents == node
    is_said = is_child & (tokens == chosen)
    if (_first(is_child, nodes, BLOCK_N) < BLOCK_N) & (_first(is_said, nodes, BLOCK_N) == BLOCK_N):
        _weigh(
            logits_ptr + node * stride_logits, tokens_ptr, above_ptr,
            partials_ptr + (node * splits + split) * 2, is_child, nodes, split, vocab, BLOCK,
            BLOCK_N,
        )  # fmt: skip
    # Nothing is counted at the root, whose place is where they meet.
    if all_arrived(above_ptr, num_nodes * splits):
        is_token = is_below & (tokens >= 0) & (tokens < vocab)
        cells = logits_ptr + parents * stride_logits + tokens
        mine = tl.load(cells, mask=is_token, other=float("-inf")).to(tl.float64)
        above = tl.load(above_ptr + nodes, mask=is_below, other=0, cache_modifier=".cg")
        end, child = tl.full([], -1, tl.int32), tl.zeros([], tl.int32)
        while child > end:  # parents come before children
            end = child
            is_child = parents == end
            said = _first(is_child & (tokens == tl.load(chosen_ptr + end)), nodes, BLOCK_N)
            is_weighed = (said == BLOCK_N) & (_first(is_child, nodes, BLOCK_N) < BLOCK_N)
            weighed = tl.where(is_weighed, splits, 0)
            is_near = _is_near(mine, partials_ptr + end * splits * 2, weighed, delta, BLOCK_S)
            fair = _first(is_child & is_near & (above < top_k), nodes, BLOCK_N)
            child = tl.minimum(tl.where(said < BLOCK_N, said, fair), BLOCK_N)
            child = tl.where(child < BLOCK_N, child, end)
        tl.store(ends_ptr + request, end.to(tl.int64))
        tl.store(out_ptr + request, tl.load(chosen_ptr + end))


def accept_relaxed(drafts: RelaxedRound, top_k: int, delta: float) -> Accepted:
    logits_TV, (batch, nodes) = drafts.logits_TV, drafts.tokens_BN.shape
    if logits_TV.stride(1) != 1:
        logits_TV = logits_TV.contiguous()
    vocab, device = logits_TV.shape[1], logits_TV.device
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab))
    splits = triton.cdiv(vocab, block)
    shares = torch.empty(batch, nodes, splits, 2, dtype=torch.float64, device=device)
    above = torch.zeros(batch, nodes, dtype=torch.int32, device=device)
    ends, tokens = torch.empty(2, batch, dtype=torch.int64, device=device)
    _accept_relaxed_kernel[(batch, nodes, splits)](
        logits_TV,
        drafts.chosen_T.contiguous(),
        drafts.tokens_BN.contiguous(),
        drafts.parents_BN.contiguous(),
        drafts.counts_B.contiguous(),
        drafts.roots_B.contiguous(),
        shares,
        above,
        ends,
        tokens,
        vocab,
        nodes,
        logits_TV.stride(0),
        top_k,
        delta,
        BLOCK=block,
        BLOCK_N=triton.next_power_of_2(nodes),
        BLOCK_S=triton.next_power_of_2(splits),
        num_warps=max(1, min(8, block // 256)),
        enable_fp_fusion=False,
    )
    return Accepted(ends, tokens)
