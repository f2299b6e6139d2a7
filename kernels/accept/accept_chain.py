"""Acceptance of chains by matching, and the state that the next round starts from."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.accept import accept_chain_ref
from specengine.kernels.accept.types import Accepted, RoundState, Simulated
from specengine.kernels.dispatch import Backend, use_triton


def begin_round(
    state: RoundState, rows_B: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Lengths and roots of the requests, int64 [B] each; the turn changes."""
    if use_triton(backend, rows_B):
        from specengine.kernels.accept import accept_chain_triton

        return accept_chain_triton.begin_round(state, rows_B)
    return accept_chain_ref.begin_round(state, rows_B)


def accept_chain(
    state: RoundState,
    rows_B: Tensor,
    chosen_BN: Tensor,
    drafts_BK: Tensor,
    context: int,
    simulated: Simulated | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Count the drafts that the target chose too, and move each request on by them::

        for b in range(B):
            accepted[b] = first k with drafts[b, k] != chosen[b, k], or K
            accepted[b] = min(accepted[b], max_accepted[rows[b]])
            outcomes[turn, b] = (accepted[b], *chosen[b])
            if rows[b] != 0:
                lens[rows[b]] = min(lens[rows[b]] + accepted[b] + 1, context - 1)
                roots[rows[b]] = chosen[b, accepted[b]]

    chosen_BN: int64 [B, K + 1], the target's token at each node; drafts_BK: int64 [B, K], K may be
    0; rows_B: int64 [B], distinct but for 0 -> accepted, int64 [B]. Any device; Triton on CUDA.
    """
    if chosen_BN.shape[1] == 1:
        simulated = None  # nothing to force, and a kernel as short as plain decoding's
    given = state, rows_B, chosen_BN, drafts_BK, context, simulated
    if use_triton(backend, chosen_BN):
        from specengine.kernels.accept import accept_chain_triton

        return accept_chain_triton.accept_chain(*given)
    return accept_chain_ref.accept_chain(*given)


def commit_chain(
    state: RoundState,
    rows_B: Tensor,
    drafts_BK: Tensor,
    found: Accepted,
    context: int,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Move each request on by the drafts that a rule accepted::

        for b in range(B):
            end = found.ends[b]
            emitted[b] = (*drafts[b, :end], found.tokens[b], ...)  # K + 1 in all
            outcomes[turn, b] = (end, *emitted[b])
            if rows[b] != 0:
                lens[rows[b]] = min(lens[rows[b]] + end + 1, context - 1)
                roots[rows[b]] = found.tokens[b]

    drafts_BK: int64, rows contiguous, K at least 1; rows_B: int64 [B], distinct but for 0 ->
    emitted, int64 [B, K + 1], whose entries past the path are tokens that mean nothing. Any device;
    one Triton kernel on CUDA.
    """
    given = state, rows_B, drafts_BK, found, context
    if use_triton(backend, drafts_BK):
        from specengine.kernels.accept import accept_chain_triton

        return accept_chain_triton.commit_chain(*given)
    return accept_chain_ref.commit_chain(*given)
