"""Target-only sampling of trees: the draft's probabilities are not needed."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.accept_coins import accept_coins
from specengine.kernels.accept_coins_ref import end_of_path
from specengine.kernels.accept_sampled_ref import Verdict
from specengine.target.verify.coins import Coins, KeyedCoins
from specengine.target.verify.probs import RoundProbs
from specengine.target.verify.sampled import SampledVerifier


class TargetOnlyVerifier(SampledVerifier):
    """One coin a node is held against the cumulative probability of its children, each of which is
    accepted with the target's probability of its token. Where none is, the next token is drawn from
    the target without them.

    Accepts what MatchVerifier accepts in distribution, without its seed-by-seed identity with plain
    decoding. Siblings carry different tokens. As backend, "sgl" walks with sglang-kernel, on a GPU.
    """

    needs_draft_probs = False

    def judge(self, probs: RoundProbs, coins: Coins) -> Verdict:
        nodes_BN = probs.nodes()
        is_child_BNN = probs.parents_BN[:, None, :] == nodes_BN[:, :, None]
        is_child_BNN &= (probs.depths_BN > 0)[:, None, :]
        chances_BNN = probs.target_of_tokens()[:, None, :] * is_child_BNN
        if self.backend == "sgl":
            assert isinstance(coins, KeyedCoins)
            given = chances_BNN, probs.parents_BN, coins.uniforms_BN
            ends_B = accept_coins(*given, backend=self.backend)
        else:
            ends_B = end_of_path(coins.pick(chances_BNN, nodes_BN))
        return Verdict(ends_B, _without_children(probs, ends_B))


def _without_children(probs: RoundProbs, nodes_B: Tensor) -> Tensor:
    target_BV = probs.target(nodes_B)
    hits_BV = torch.zeros_like(target_BV)
    hits_BV.scatter_add_(1, probs.tokens_BN, probs.children(nodes_B).double())
    return target_BV.masked_fill(hits_BV > 0, 0.0)
