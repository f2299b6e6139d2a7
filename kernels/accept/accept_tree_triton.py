"""Acceptance of trees in Triton: a program a request."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.accept.accept_chain_triton import uniform
from specengine.kernels.accept.types import AcceptedPaths, RoundState, Simulated
from specengine.kernels.tree.types import DraftTree


@triton.jit(do_not_specialize=["whole"])
def _accept_tree_kernel(
    chosen_ptr,
    tokens_ptr,
    parents_ptr,
    rows_ptr,
    lens_ptr,
    roots_ptr,
    limits_ptr,
    turn_ptr,
    outcomes_ptr,
    accepted_ptr,
    path_ptr,
    path_rows_ptr,
    emitted_ptr,
    stride_turn,
    stride_outcomes,
    num_nodes,
    steps,
    context,
    whole,
    part,
    IS_SIMULATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK)
    exists = nodes < num_nodes
    first = request * num_nodes
    chosen = tl.load(chosen_ptr + first + nodes, mask=exists, other=0)
    tokens = tl.load(tokens_ptr + first + nodes, mask=exists, other=0)
    parents = tl.load(parents_ptr + first + nodes, mask=exists, other=-2)
    row = tl.load(rows_ptr + request)
    length = tl.load(lens_ptr + row)
    most = tl.zeros([], tl.int64) + steps
    if IS_SIMULATED:
        most = (uniform(length, row) < part).to(tl.int64) + whole
    most = tl.minimum(most, tl.load(limits_ptr + row))
    outcomes_ptr += tl.load(turn_ptr) * stride_turn + request * stride_outcomes
    path_ptr += request * (steps + 1)
    path_rows_ptr += request * (steps + 1)
    emitted_ptr += request * (steps + 1)

    root_token = tl.sum(tl.where(nodes == 0, chosen, 0), 0)
    token = root_token
    node = tl.zeros([], tl.int64)
    accepted = tl.zeros([], tl.int64)
    tl.store(path_ptr, node)
    tl.store(path_rows_ptr, first)
    tl.store(emitted_ptr, token)
    tl.store(outcomes_ptr + 1, token)
    for level in range(steps):
        fits = parents == node
        if not IS_SIMULATED:
            fits = fits & (tokens == token)
        child = tl.min(tl.where(fits, nodes, BLOCK), 0).to(tl.int64)
        # A path that has ended stays so.
        goes_on = (child < BLOCK) & (accepted == level) & (level < most)
        node = tl.where(goes_on, child, 0)
        here = tl.sum(tl.where(nodes == node, chosen, 0), 0)
        token = tl.where(goes_on, here, token)
        accepted += goes_on.to(tl.int64)
        shown = tl.where(goes_on, here, root_token)
        tl.store(path_ptr + level + 1, node)
        tl.store(path_rows_ptr + level + 1, first + node)
        tl.store(emitted_ptr + level + 1, shown)
        tl.store(outcomes_ptr + level + 2, shown)
        tl.store(outcomes_ptr + steps + level + 2, node)
    tl.store(outcomes_ptr, accepted)
    tl.store(accepted_ptr + request, accepted)
    tl.store(lens_ptr + row, tl.minimum(length + accepted + 1, context - 1), mask=row != 0)
    tl.store(roots_ptr + row, token, mask=row != 0)


def accept_tree(
    state: RoundState,
    rows_B: Tensor,
    chosen_BN: Tensor,
    tree: DraftTree,
    num_steps: int,
    context: int,
    simulated: Simulated | None,
) -> AcceptedPaths:
    requests, nodes = tree.tokens_BN.shape
    path = torch.empty(requests, num_steps + 1, dtype=torch.int64, device=chosen_BN.device)
    accepted, emitted = torch.empty_like(rows_B), torch.empty_like(path)
    path_rows = torch.empty_like(path).view(-1)
    _accept_tree_kernel[(requests,)](
        chosen_BN,
        tree.tokens_BN,
        tree.parents_BN,
        rows_B,
        state.lens,
        state.roots,
        state.max_accepted,
        state.turn,
        state.outcomes,
        accepted,
        path,
        path_rows,
        emitted,
        *state.outcomes.stride()[:2],
        nodes,
        num_steps,
        context,
        0 if simulated is None else simulated.whole,
        0.0 if simulated is None else simulated.part,
        IS_SIMULATED=simulated is not None,
        BLOCK=triton.next_power_of_2(nodes),
        num_warps=1,
    )
    return AcceptedPaths(accepted, emitted, path, path_rows)
