"""Token-level rejection for chains (Leviathan et al. 2023, algorithm 1)."""

from __future__ import annotations

from specengine.kernels.accept.accept_rejection import accept_rejection
from specengine.kernels.accept.accept_rejection_ref import judge
from specengine.kernels.accept.accept_sampled_ref import Verdict
from specengine.kernels.accept.types import SampledRound
from specengine.target.verify.coins import Coins
from specengine.target.verify.sampled import SampledVerifier


class RejectionVerifier(SampledVerifier):
    """Accept each token with ``min(1, target / draft)``, up to the first that is rejected; draw
    from ``norm(relu(target - draft))`` in its place."""

    takes_trees = False
    kernel = staticmethod(accept_rejection)

    def judge(self, probs: SampledRound, coins: Coins) -> Verdict:
        return judge(probs, coins.pick)
