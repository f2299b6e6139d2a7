"""Target-only sampling of trees: the draft's probabilities are not needed."""

from __future__ import annotations

from specengine.kernels.accept.accept_sampled_ref import Verdict
from specengine.kernels.accept.accept_target_only import accept_target_only
from specengine.kernels.accept.accept_target_only_ref import judge
from specengine.kernels.accept.types import SampledRound
from specengine.target.verify.coins import Coins
from specengine.target.verify.sampled import SampledVerifier


class TargetOnlyVerifier(SampledVerifier):
    """One coin a node is held against the cumulative probability of its children, each of which is
    accepted with the target's probability of its token. Where none is, the next token is drawn from
    the target without them.

    Accepts what MatchVerifier accepts in distribution, without its seed-by-seed identity with plain
    decoding. Siblings carry different tokens. As backend, "sgl" walks with sglang-kernel, on a GPU.
    """

    needs_draft_probs = False
    kernel = staticmethod(accept_target_only)

    def judge(self, probs: SampledRound, coins: Coins) -> Verdict:
        return judge(probs, coins.pick)
