"""Paths that a rule has decided on, in Triton: a program a request."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.accept.types import Accepted, AcceptedPaths, RoundState
from specengine.kernels.tree.types import DraftTree


@triton.jit(do_not_specialize=["width"])
def _accept_path_kernel(
    ends_ptr,
    lasts_ptr,
    tokens_ptr,
    parents_ptr,
    mask_ptr,
    rows_ptr,
    lens_ptr,
    roots_ptr,
    turn_ptr,
    outcomes_ptr,
    accepted_ptr,
    path_ptr,
    path_rows_ptr,
    emitted_ptr,
    stride_turn,
    stride_outcomes,
    num_nodes,
    width,
    context,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK)
    exists = nodes < num_nodes
    first = request * num_nodes
    end, last = tl.load(ends_ptr + request), tl.load(lasts_ptr + request)
    on_path = tl.load(mask_ptr + (first + end) * num_nodes + nodes, mask=exists, other=0) != 0
    tokens = tl.load(tokens_ptr + first + nodes, mask=exists, other=0)
    parents = tl.load(parents_ptr + first + nodes, mask=exists, other=0)
    drafted = tl.sum((exists & (parents != nodes)).to(tl.int64), 0) - 1
    # Parents come before their children: a path is its nodes in order.
    place = tl.cumsum(on_path.to(tl.int32), 0) - 1
    accepted = tl.sum(on_path.to(tl.int64), 0) - 1
    below = on_path & (place > 0)
    child = tl.sum(tl.where(below & (place == 1), tokens, 0), 0)
    first_token = tl.where(accepted == 0, last, child)

    outcomes_ptr += tl.load(turn_ptr) * stride_turn + request * stride_outcomes
    path_ptr += request * width
    path_rows_ptr += request * width
    emitted_ptr += request * width
    numbers = nodes.to(tl.int64)
    tl.store(path_ptr + place, numbers, mask=on_path)
    tl.store(path_rows_ptr + place, first + numbers, mask=on_path)
    tl.store(outcomes_ptr + width + place, numbers, mask=below)
    tl.store(emitted_ptr + place - 1, tokens, mask=below)
    tl.store(outcomes_ptr + place, tokens, mask=below)
    levels = tl.arange(0, BLOCK_W)
    past = (levels > accepted) & (levels < width)
    none = tl.zeros([BLOCK_W], tl.int64)
    tl.store(path_ptr + levels, none, mask=past)
    tl.store(path_rows_ptr + levels, none + first, mask=past)
    tl.store(outcomes_ptr + width + levels, none, mask=past)
    emitted = tl.where(levels == accepted, last, first_token)
    ends_here = (levels >= accepted) & (levels < width)
    tl.store(emitted_ptr + levels, emitted, mask=ends_here)
    tl.store(outcomes_ptr + 1 + levels, emitted, mask=ends_here)
    tl.store(outcomes_ptr, accepted)
    tl.store(outcomes_ptr + 2 * width, drafted)
    tl.store(accepted_ptr + request, accepted)
    row = tl.load(rows_ptr + request)
    length = tl.load(lens_ptr + row)
    tl.store(lens_ptr + row, tl.minimum(length + accepted + 1, context - 1), mask=row != 0)
    tl.store(roots_ptr + row, last, mask=row != 0)


def accept_path(
    state: RoundState,
    rows_B: Tensor,
    found: Accepted,
    tree: DraftTree,
    num_steps: int,
    context: int,
) -> AcceptedPaths:
    (requests, nodes), width = tree.tokens_BN.shape, num_steps + 1
    path = torch.empty(requests, width, dtype=torch.int64, device=rows_B.device)
    accepted, emitted = torch.empty_like(rows_B), torch.empty_like(path)
    path_rows = torch.empty_like(path).view(-1)
    _accept_path_kernel[(requests,)](
        found.ends_B,
        found.tokens_B,
        tree.tokens_BN,
        tree.parents_BN,
        tree.mask_BNN.view(torch.uint8),
        rows_B,
        state.lens,
        state.roots,
        state.turn,
        state.outcomes,
        accepted,
        path,
        path_rows,
        emitted,
        *state.outcomes.stride()[:2],
        nodes,
        width,
        context,
        BLOCK=triton.next_power_of_2(nodes),
        BLOCK_W=triton.next_power_of_2(width),
        num_warps=1,
    )
    return AcceptedPaths(accepted, emitted, path, path_rows)
