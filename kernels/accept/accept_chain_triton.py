"""Acceptance of chains in Triton: a program a request."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.accept.types import Accepted, RoundState, Simulated


@triton.jit(do_not_specialize=["requests"])
def _begin_round_kernel(
    rows_ptr, lens_ptr, roots_ptr, turn_ptr, lens_out_ptr, roots_out_ptr, requests,
    BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < requests
    rows = tl.load(rows_ptr + places, mask=mask, other=0)
    tl.store(lens_out_ptr + places, tl.load(lens_ptr + rows, mask=mask, other=0), mask=mask)
    tl.store(roots_out_ptr + places, tl.load(roots_ptr + rows, mask=mask, other=0), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(turn_ptr, 1 - tl.load(turn_ptr))


def begin_round(state: RoundState, rows_B: Tensor) -> tuple[Tensor, Tensor]:
    lens, roots = torch.empty_like(rows_B), torch.empty_like(rows_B)
    block = 64
    _begin_round_kernel[(triton.cdiv(len(rows_B), block),)](
        rows_B,
        state.lens,
        state.roots,
        state.turn,
        lens,
        roots,
        len(rows_B),
        BLOCK=block,
        num_warps=1,
    )
    return lens, roots


@triton.jit
def uniform(length, row):
    """In [0, 1), different for each round of each request."""
    x = (length * 2654435761 + row * 40503) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 2246822519) & 0xFFFFFFFF
    x = x ^ (x >> 13)
    return x.to(tl.float64) / 4294967296.0


@triton.jit(do_not_specialize=["whole"])
def _accept_chain_kernel(
    chosen_ptr,
    drafts_ptr,
    rows_ptr,
    lens_ptr,
    roots_ptr,
    limits_ptr,
    turn_ptr,
    outcomes_ptr,
    accepted_ptr,
    stride_drafts,
    stride_turn,
    stride_outcomes,
    steps,
    context,
    whole,
    part,
    IS_SIMULATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK)
    is_draft = nodes < steps
    row = tl.load(rows_ptr + request)
    length = tl.load(lens_ptr + row)
    chosen_ptr += request * (steps + 1)
    chosen = tl.load(chosen_ptr + nodes, mask=nodes <= steps, other=0)
    if IS_SIMULATED:
        accepted = (uniform(length, row) < part).to(tl.int64) + whole
    else:
        drafts = tl.load(drafts_ptr + request * stride_drafts + nodes, mask=is_draft, other=-1)
        # The first node where they differ; past the drafts they always do.
        accepted = tl.min(tl.where((drafts == chosen) & is_draft, BLOCK, nodes), 0).to(tl.int64)
    accepted = tl.minimum(tl.minimum(accepted, steps), tl.load(limits_ptr + row))
    tl.store(accepted_ptr + request, accepted)
    outcomes_ptr += tl.load(turn_ptr) * stride_turn + request * stride_outcomes
    tl.store(outcomes_ptr, accepted)
    tl.store(outcomes_ptr + 1 + nodes, chosen, mask=nodes <= steps)
    tl.store(lens_ptr + row, tl.minimum(length + accepted + 1, context - 1), mask=row != 0)
    tl.store(roots_ptr + row, tl.load(chosen_ptr + accepted), mask=row != 0)


def accept_chain(
    state: RoundState,
    rows_B: Tensor,
    chosen_BN: Tensor,
    drafts_BK: Tensor,
    context: int,
    simulated: Simulated | None,
) -> Tensor:
    requests, nodes = chosen_BN.shape
    accepted = torch.empty(requests, dtype=torch.int64, device=chosen_BN.device)
    _accept_chain_kernel[(requests,)](
        chosen_BN,
        drafts_BK,
        rows_B,
        state.lens,
        state.roots,
        state.max_accepted,
        state.turn,
        state.outcomes,
        accepted,
        drafts_BK.stride(0),
        *state.outcomes.stride()[:2],
        nodes - 1,
        context,
        0 if simulated is None else simulated.whole,
        0.0 if simulated is None else simulated.part,
        IS_SIMULATED=simulated is not None,
        BLOCK=triton.next_power_of_2(nodes),
        num_warps=1,
    )
    return accepted


@triton.jit
def _commit_chain_kernel(
    drafts_ptr,
    ends_ptr,
    lasts_ptr,
    rows_ptr,
    lens_ptr,
    roots_ptr,
    turn_ptr,
    outcomes_ptr,
    emitted_ptr,
    stride_drafts,
    stride_turn,
    stride_outcomes,
    steps,
    context,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + request)
    end, last = tl.load(ends_ptr + request), tl.load(lasts_ptr + request)
    drafts = tl.load(drafts_ptr + request * stride_drafts + nodes, mask=nodes < steps, other=0)
    emitted = tl.where((nodes == end) | (nodes == steps), last, drafts)
    exists = nodes <= steps
    tl.store(emitted_ptr + request * (steps + 1) + nodes, emitted, mask=exists)
    outcomes_ptr += tl.load(turn_ptr) * stride_turn + request * stride_outcomes
    tl.store(outcomes_ptr, end)
    tl.store(outcomes_ptr + 1 + nodes, emitted, mask=exists)
    length = tl.load(lens_ptr + row)
    tl.store(lens_ptr + row, tl.minimum(length + end + 1, context - 1), mask=row != 0)
    tl.store(roots_ptr + row, last, mask=row != 0)


def commit_chain(
    state: RoundState, rows_B: Tensor, drafts_BK: Tensor, found: Accepted, context: int
) -> Tensor:
    requests, steps = drafts_BK.shape
    emitted = torch.empty(requests, steps + 1, dtype=torch.int64, device=drafts_BK.device)
    _commit_chain_kernel[(requests,)](
        drafts_BK,
        found.ends_B,
        found.tokens_B,
        rows_B,
        state.lens,
        state.roots,
        state.turn,
        state.outcomes,
        emitted,
        drafts_BK.stride(0),
        *state.outcomes.stride()[:2],
        steps,
        context,
        BLOCK=triton.next_power_of_2(steps + 1),
        num_warps=1,
    )
    return emitted
