"""Acceptance of chains in Triton: a program a request."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _accept_chain_kernel(
    chosen_ptr,
    drafts_ptr,
    rows_ptr,
    lens_ptr,
    roots_ptr,
    forced_ptr,
    out_ptr,
    stride_drafts,
    steps,
    context,
    IS_FORCED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK)
    is_draft = nodes < steps
    chosen_ptr += request * (steps + 1)
    chosen = tl.load(chosen_ptr + nodes, mask=nodes <= steps, other=0)
    if IS_FORCED:
        accepted = tl.load(forced_ptr + request)
    else:
        drafts = tl.load(drafts_ptr + request * stride_drafts + nodes, mask=is_draft, other=-1)
        # The first node where they differ; past the drafts they always do.
        accepted = tl.min(tl.where((drafts == chosen) & is_draft, BLOCK, nodes), 0).to(tl.int64)
        accepted = tl.minimum(accepted, steps)
    out_ptr += request * (steps + 2)
    tl.store(out_ptr, accepted)
    tl.store(out_ptr + 1 + nodes, chosen, mask=nodes <= steps)
    row = tl.load(rows_ptr + request)
    length = tl.load(lens_ptr + row) + accepted + 1
    tl.store(lens_ptr + row, tl.minimum(length, context - 1), mask=row != 0)
    tl.store(roots_ptr + row, tl.load(chosen_ptr + accepted), mask=row != 0)


def accept_chain(
    chosen_BN: Tensor,
    drafts_BK: Tensor,
    rows_B: Tensor,
    lens: Tensor,
    roots: Tensor,
    context: int,
    forced_B: Tensor | None,
) -> Tensor:
    requests, nodes = chosen_BN.shape
    out = torch.empty((requests, nodes + 1), dtype=torch.int64, device=chosen_BN.device)
    _accept_chain_kernel[(requests,)](
        chosen_BN,
        drafts_BK,
        rows_B,
        lens,
        roots,
        rows_B if forced_B is None else forced_B,
        out,
        drafts_BK.stride(0),
        nodes - 1,
        context,
        IS_FORCED=forced_B is not None,
        BLOCK=triton.next_power_of_2(nodes),
        num_warps=1,
    )
    return out
