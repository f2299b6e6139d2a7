"""Trees whose siblings were sampled without replacement: recursive rejection (Miao et al. 2023,
SpecInfer, algorithm 2; without replacement as in Jeon et al. 2024)."""

from __future__ import annotations

from specengine.kernels.accept.accept_sampled_ref import Verdict
from specengine.kernels.accept.accept_sibling import accept_sibling
from specengine.kernels.accept.accept_sibling_ref import judge
from specengine.kernels.accept.types import SampledRound
from specengine.target.verify.coins import Coins
from specengine.target.verify.sampled import SampledVerifier


class SiblingVerifier(SampledVerifier):
    """From the root down, one child after the other: accept it with ``min(1, target / draft)``, or
    else go on with ``target = norm(relu(target - draft))`` and the draft without its token. What is
    left of the target after the last child gives the next token.

    On chains this is token-level rejection.
    """

    kernel = staticmethod(accept_sibling)

    def judge(self, probs: SampledRound, coins: Coins) -> Verdict:
        return judge(probs, coins.pick)
