"""Acceptance of sampled chains as a whole."""

from __future__ import annotations

from specengine.kernels.accept import accept_block_ref, accept_sampled_ref
from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from specengine.kernels.dispatch import Backend, use_triton


def accept_block(drafts: SampledRound, draws: Draws, *, backend: Backend = "auto") -> Accepted:
    """Block verification (Sun et al. 2024, algorithm 2)::

        for b in range(B):
            p[0] = 1
            for i in 1 .. last: p[i] = min(1, p[i - 1] * target[i - 1, token i] / draft[i, token i])
            for i in 0 .. last - 1: missing[i] = sum(relu(p[i] * target[i] - draft[i + 1]))
            chance[i] = missing[i] / (missing[i] + 1 - p[i]), or p[i] for the last
            end = the last i with coin(i) < chance[i], or 0
            if end < last:
                token = sample(relu(p[end] * target[end] - draft[end + 1]) / missing[end])
            else:
                token = sample(target_weights[end])

    target, draft, coin and sample, and how far Triton on CUDA may differ, are those of
    accept_rejection. Any device.
    """
    if use_triton(backend, drafts.target_TV):
        from specengine.kernels.accept import accept_block_triton

        return accept_block_triton.accept_block(drafts, draws)
    return accept_sampled_ref.accept(drafts, draws, accept_block_ref.judge)
