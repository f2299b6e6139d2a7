"""Acceptance of trees by the target's probabilities alone."""

from __future__ import annotations

from specengine.kernels.accept import accept_sampled_ref, accept_target_only_ref
from specengine.kernels.accept.accept_coins import accept_coins
from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from specengine.kernels.dispatch import Backend, use_triton


def accept_target_only(
    drafts: SampledRound, draws: Draws, *, backend: Backend = "auto"
) -> Accepted:
    """One coin a node decides among its children, which carry different tokens::

        for b in range(B):
            end = 0
            while coin(end) < sum(target[end, tokens of the children of end]):
                end = the first child up to which that sum exceeds coin(end)
            token = sample(target[end] without the tokens of its children, scaled to 1),
                    or sample(target_weights[end]) where end has no children

    target, coin and sample are those of accept_rejection; what drafts were sampled from is not
    read. Any device. Triton on CUDA sums in another order, over children as well: how far it may
    differ is as there. As "sgl", the path is accept_coins' by sglang-kernel.
    """
    if use_triton(backend, drafts.target_TV):
        from specengine.kernels.accept import accept_target_only_triton

        return accept_target_only_triton.accept_target_only(drafts, draws)
    if backend == "sgl":
        chances_BNN = accept_target_only_ref.child_chances(drafts)
        coins_BN = accept_sampled_ref.coin_uniforms(drafts, draws)
        ends_B = accept_coins(chances_BNN, drafts.parents_BN, coins_BN, backend=backend)
        verdict = accept_target_only_ref.verdict_at(drafts, ends_B)
        uniforms_B = accept_sampled_ref.next_uniforms(drafts, ends_B, draws)
        return accept_sampled_ref.followed(drafts, verdict, uniforms_B)
    return accept_sampled_ref.accept(drafts, draws, accept_target_only_ref.judge)
