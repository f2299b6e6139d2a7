"""Acceptance of trees whose siblings were sampled without replacement."""

from __future__ import annotations

from specengine.kernels.accept import accept_sampled_ref, accept_sibling_cuda, accept_sibling_ref
from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from specengine.kernels.dispatch import Backend, use_triton


def accept_sibling(drafts: SampledRound, draws: Draws, *, backend: Backend = "auto") -> Accepted:
    """Recursive rejection (Miao et al. 2023, SpecInfer, algorithm 2; without replacement as in
    Jeon et al. 2024)::

        for b in range(B):
            end = 0
            repeat:
                left = target[end]
                for child in the children of end, in order:
                    mine = draft[child] without the tokens of children before it, scaled to 1
                    if coin(child) < min(1, left[its token] / mine[its token]):
                        end = child; go on below it
                    left = relu(left - mine), scaled to 1     # unless nothing is left
                stop
            token = sample(left), or sample(target_weights[end]) where end has no children

    target, draft, coin and sample, and how far Triton on CUDA may differ, are those of
    accept_rejection. Any device; "cuda", on Hopper, and Triton do without the reference's wait for
    the host.
    """
    if accept_sibling_cuda.takes(backend, drafts):
        return accept_sibling_cuda.accept_sibling(drafts, draws)
    if use_triton(backend, drafts.target_TV):
        from specengine.kernels.accept import accept_sibling_triton

        return accept_sibling_triton.accept_sibling(drafts, draws)
    return accept_sampled_ref.accept(drafts, draws, accept_sibling_ref.judge)
