"""Token-level rejection for chains (Leviathan et al. 2023, algorithm 1)."""

from __future__ import annotations

from specengine.core.sampling_batch import SamplingBatch
from specengine.kernels.accept_rejection import accept_rejection
from specengine.kernels.accept_rejection_ref import judge
from specengine.kernels.accept_sampled import Accepted
from specengine.kernels.accept_sampled_ref import Verdict
from specengine.target.verify.coins import Coins
from specengine.target.verify.probs import RoundProbs
from specengine.target.verify.sampled import SampledVerifier, draws_of


class RejectionVerifier(SampledVerifier):
    """Accept each token with ``min(1, target / draft)``, up to the first that is rejected; draw
    from ``norm(relu(target - draft))`` in its place."""

    takes_trees = False

    def judge(self, probs: RoundProbs, coins: Coins) -> Verdict:
        return judge(probs, coins.pick)

    def decide(self, probs: RoundProbs, sampling: SamplingBatch) -> Accepted:
        return accept_rejection(probs, draws_of(sampling), backend=self.backend)
