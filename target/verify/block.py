"""Block verification for chains (Sun et al. 2024, "Block Verification Accelerates Speculative
Decoding", algorithm 2): verifies drafted tokens together, and accepts at least as many as
token-level rejection does."""

from __future__ import annotations

from specengine.kernels.accept.accept_block import accept_block
from specengine.kernels.accept.accept_block_ref import judge
from specengine.kernels.accept.accept_sampled_ref import Verdict
from specengine.kernels.accept.types import SampledRound
from specengine.target.verify.coins import Coins
from specengine.target.verify.sampled import SampledVerifier


class BlockVerifier(SampledVerifier):
    """Each token has a coin of its own; the last one that is accepted ends the path, whatever the
    coins of those before it say. The residual after token i is ``norm(relu(p_i * target -
    draft))``.

    Coins and drafts beyond the end have been looked at: they must be new in the next round.
    """

    takes_trees = False
    kernel = staticmethod(accept_block)

    def judge(self, probs: SampledRound, coins: Coins) -> Verdict:
        return judge(probs, coins.pick)
