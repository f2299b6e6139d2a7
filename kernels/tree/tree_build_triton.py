"""The tree that goes to verification, in Triton: a program a request."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.head.partials_triton import ordered_key
from specengine.kernels.tree.types import DraftTree, Found, TreeLimits

_CELLS = 8192  # of a tile in which candidates are compared


@triton.jit
def _ranks(
    scores_ptr, tokens_ptr, candidates, among,
    HAVE_TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OTHERS: tl.constexpr,
):  # fmt: skip
    """How many of the first `among` candidates go before each; of those that have tokens alone."""
    mine = tl.arange(0, BLOCK)
    keys = ordered_key(tl.load(scores_ptr + mine, mask=mine < candidates, other=0.0), mine)
    ranks = tl.zeros([BLOCK], tl.int32)
    for start in range(0, among, BLOCK_OTHERS):
        others = start + tl.arange(0, BLOCK_OTHERS)
        other_scores = tl.load(scores_ptr + others, mask=others < among, other=0.0)
        counts = others < among
        if HAVE_TOKENS:
            counts &= tl.load(tokens_ptr + others, mask=counts, other=-1) >= 0
        other_keys = tl.where(counts, ordered_key(other_scores, others), -1)
        ranks += tl.sum((other_keys[None, :] > keys[:, None]).to(tl.int32), 1)
    return ranks


@triton.jit
def _found_within(depth, topk, candidates):
    """How many candidates lie no deeper; they are the first."""
    found = tl.minimum(topk + (depth - 1) * topk * topk, candidates)
    return tl.where(depth > 0, found, 0)


@triton.jit
def climb(parents_ptr, rows, cols, exists, levels):
    """Depths of nodes (rows), and which others (cols) they are or lie below."""
    ancestor = rows.to(tl.int64)
    depth = tl.zeros_like(ancestor)
    mask = rows[:, None] == cols[None, :]
    for _ in range(levels):
        below = exists & (ancestor > 0)
        depth += below.to(tl.int64)
        ancestor = tl.load(parents_ptr + ancestor, mask=below, other=0)
        mask = mask | (ancestor[:, None] == cols[None, :])
    return depth, mask


@triton.jit(do_not_specialize=["topk"])
def _tree_build_kernel(
    roots_ptr,
    found_tokens_ptr,
    scores_ptr,
    found_parents_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    mask_ptr,
    candidates_ptr,
    node_of_ptr,
    most_ptr,
    deepest_ptr,
    topk,
    candidates,
    nodes,
    levels,
    IS_LIMITED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    tokens_ptr += request * nodes
    parents_ptr += request * nodes
    node_of_ptr += request * candidates
    scores_ptr += request * candidates
    found_tokens_ptr += request * candidates
    mine = tl.arange(0, BLOCK_C)
    rows = tl.arange(0, BLOCK_N)
    exists = rows < nodes
    if IS_LIMITED:
        most = tl.minimum(tl.load(most_ptr + request), nodes)
        deepest = tl.minimum(tl.load(deepest_ptr + request), most - 1)
        among = _found_within(most - 1, topk, candidates)
        ranks = _ranks(
            scores_ptr, found_tokens_ptr, candidates, among, False, BLOCK_C, BLOCK_OTHERS
        )
        kept = _found_within(deepest, topk, candidates)
        chosen = (mine < kept) & (ranks < most - 1)
        chosen &= tl.load(found_tokens_ptr + mine, mask=chosen, other=-1) >= 0
        # Whatever goes before one that stays, is no deeper and has a token, stays as well.
        ranks = _ranks(scores_ptr, found_tokens_ptr, candidates, kept, True, BLOCK_C, BLOCK_OTHERS)
        candidates_ptr += request * nodes
        tl.store(candidates_ptr + ranks + 1, mine.to(tl.int64), mask=chosen)
        lacks = exists & (rows > tl.sum(chosen.to(tl.int32), 0))
        none = tl.zeros([BLOCK_N], tl.int64)
        tl.store(tokens_ptr + rows, none, mask=lacks)
        tl.store(candidates_ptr + rows, none, mask=lacks | (rows == 0))
        tl.store(parents_ptr + rows, rows.to(tl.int64), mask=lacks)
    else:
        ranks = _ranks(
            scores_ptr, found_tokens_ptr, candidates, candidates, False, BLOCK_C, BLOCK_OTHERS
        )
        chosen = (mine < candidates) & (ranks < nodes - 1)
    node = ranks.to(tl.int64) + 1
    tl.store(node_of_ptr + mine, node, mask=chosen)
    token = tl.load(found_tokens_ptr + mine, mask=chosen, other=0)
    above = tl.load(found_parents_ptr + request * candidates + mine, mask=chosen, other=-1)
    tl.store(tokens_ptr + node, token, mask=chosen)
    tl.store(tokens_ptr, tl.load(roots_ptr + request))
    # Threads read below what others of this program have written.
    tl.debug_barrier()
    parent = tl.load(node_of_ptr + above, mask=chosen & (above >= 0), other=0)
    tl.store(parents_ptr + node, parent, mask=chosen)
    tl.store(parents_ptr, -1)
    tl.debug_barrier()

    depth, mask = climb(parents_ptr, rows, rows, exists, levels)
    tl.store(depths_ptr + request * nodes + rows, depth, mask=exists)
    cells = (request * nodes + rows[:, None]) * nodes + rows[None, :]
    tl.store(mask_ptr + cells, mask.to(tl.uint8), mask=exists[:, None] & exists[None, :])


def tree_build(
    roots_B: Tensor, found: Found, num_nodes: int, num_steps: int, limits: TreeLimits | None
) -> DraftTree:
    batch_size, candidates = found.tokens_BC.shape
    tree = DraftTree.unset(batch_size, num_nodes, roots_B.device)
    if limits is not None:
        tree = replace(tree, candidates_BN=torch.empty_like(tree.tokens_BN))
    block = triton.next_power_of_2(candidates)
    _tree_build_kernel[(batch_size,)](
        roots_B,
        found.tokens_BC,
        found.scores_BC,
        found.parents_BC,
        tree.tokens_BN,
        tree.parents_BN,
        tree.depths_BN,
        tree.mask_BNN.view(torch.uint8),
        tree.tokens_BN if tree.candidates_BN is None else tree.candidates_BN,
        torch.empty_like(found.tokens_BC),
        roots_B if limits is None else limits.nodes_B,
        roots_B if limits is None else limits.depths_B,
        0 if limits is None else limits.topk,
        candidates,
        num_nodes,
        num_steps,
        IS_LIMITED=limits is not None,
        BLOCK_C=block,
        BLOCK_OTHERS=max(1, min(block, _CELLS // block)),
        BLOCK_N=triton.next_power_of_2(num_nodes),
        num_warps=4,
    )
    return tree
