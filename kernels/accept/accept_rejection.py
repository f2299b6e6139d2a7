"""Acceptance of sampled chains token by token."""

from __future__ import annotations

from specengine.kernels.accept import accept_rejection_ref, accept_sampled_ref
from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from specengine.kernels.dispatch import Backend, use_triton


def accept_rejection(drafts: SampledRound, draws: Draws, *, backend: Backend = "auto") -> Accepted:
    """Token-level rejection (Leviathan et al. 2023, algorithm 1)::

        for b in range(B):
            end = 0
            while node end + 1 exists and coin(end + 1) < min(1, target[end, its token]
                                                                 / draft[end + 1, its token]):
                end += 1
            if node end + 1 exists:
                token = sample(relu(target[end] - draft[end + 1]) / its sum, residual stream)
            else:
                token = sample(target_weights[end], sample stream)

    target, draft: rows of `drafts` over their sums, float64; coin: keyed_uniform(seed,
    position + depth - 1 + LANE * node, accept stream); sample: the first token of which the running
    sum of floor(weight * 2^43) exceeds floor(u * sum), u keyed by position + depth of the end.

    Any device. On CUDA in Triton, which sums over the vocabulary in another order: sums differ by
    some 2^-50 of themselves, and a decision only where a uniform lies so near to a border. All
    else is done alike, and after a path with no draft below it, the token is the same in any
    case. Waits for nothing.
    """
    if use_triton(backend, drafts.target_TV):
        from specengine.kernels.accept import accept_rejection_triton

        return accept_rejection_triton.accept_rejection(drafts, draws)
    return accept_sampled_ref.accept(drafts, draws, accept_rejection_ref.judge)
