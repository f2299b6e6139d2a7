"""Token-level rejection for chains (Leviathan et al. 2023, algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.target.verify.coins import Coins, stands
from specengine.target.verify.probs import RoundProbs
from specengine.target.verify.sampled import SampledVerifier, Verdict


def accept_chance(target: Tensor, draft: Tensor) -> Tensor:
    """min(1, target / draft): a uniform u < 1 lies below it exactly where ``u * draft < target``,
    so that a token which the target never says never stands."""
    ratio = torch.where(draft > 0, target / draft, (target > 0).double())
    return ratio.clamp(max=1.0)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """What the target says and the draft does not, up to a factor."""
    return (target - draft).relu()


class RejectionVerifier(SampledVerifier):
    """Accept each token with ``min(1, target / draft)``, up to the first that is rejected; draw
    from ``norm(relu(target - draft))`` in its place."""

    takes_trees = False

    def judge(self, probs: RoundProbs, coins: Coins) -> Verdict:
        chances_BD = accept_chance(probs.target_of_tokens(), probs.draft_of_tokens())[:, 1:]
        stands_BD = stands(coins, chances_BD, probs.nodes()[:, 1:]) & probs.exists_BN[:, 1:]
        ends_B = stands_BD.long().cumprod(-1).sum(-1)
        return Verdict(ends_B, residual(probs.target(ends_B), probs.draft(after(ends_B, probs))))


def after(ends_B: Tensor, probs: RoundProbs) -> Tensor:
    """The next node of each chain, or the last of the row where there is none."""
    return (ends_B + 1).clamp(max=probs.tokens_BN.shape[1] - 1)
