"""Acceptance of drafts that are nearly as good as the target's own token."""

from __future__ import annotations

from specengine.kernels.accept import accept_relaxed_ref
from specengine.kernels.accept.types import Accepted, RelaxedRound
from specengine.kernels.dispatch import Backend, use_triton


def accept_relaxed(
    drafts: RelaxedRound, top_k: int, delta: float, *, backend: Backend = "auto"
) -> Accepted:
    """Walk from each root to the first child that carries the target's token, or else to the first
    that is fair after it, while there is one::

        for b in range(B):
            end = 0
            while a child of end carries chosen[end] or is fair:
                end = the first such child     # those that carry it before those that are fair
            token = chosen[end]

        fair(child) = prob(child) > 0
                      and fewer than top_k tokens have a larger logit
                      and prob(child) >= (the largest prob) - delta

    prob: of a token in the softmax of its parent's row, float64; delta: as a float32. This is how
    TensorRT-LLM relaxes acceptance for DeepSeek-R1, with the target's own token always fair.

    Any device. On CUDA in one launch of Triton, which sums over the vocabulary in another order:
    probs differ by some 2^-50 of themselves, and a decision only where one lies so near to its bar.
    Waits for nothing.
    """
    if use_triton(backend, drafts.logits_TV):
        from specengine.kernels.accept import accept_relaxed_triton

        return accept_relaxed_triton.accept_relaxed(drafts, top_k, delta)
    return accept_relaxed_ref.accept_relaxed(drafts, top_k, delta)
