"""Block verification for chains (Sun et al. 2024, "Block Verification Accelerates Speculative
Decoding", algorithm 2): judges drafted tokens together, and accepts at least as many as token-level
rejection does."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.target.verify.coins import Coins, stands
from specengine.target.verify.probs import RoundProbs
from specengine.target.verify.rejection import after, residual
from specengine.target.verify.sampled import SampledVerifier, Verdict


def path_chances(target_BD: Tensor, draft_BD: Tensor) -> Tensor:
    """float64 [B, D + 1]: p_0 = 1, p_i = min(1, p_{i-1} * target_i / draft_i)."""
    chances = [torch.ones_like(target_BD[:, 0])]
    for target, draft in zip(target_BD.unbind(1), draft_BD.unbind(1), strict=True):
        wanted = chances[-1] * target
        ratio = torch.where(draft > 0, wanted / draft, (wanted > 0).double())
        chances.append(ratio.clamp(max=1.0))
    return torch.stack(chances, dim=1)


def stop_chance(path_chance: Tensor, missing: Tensor) -> Tensor:
    """h_i = S_i / (S_i + 1 - p_i): of stopping at a token, given that none after it stands.

    missing: S_i, the mass of relu(p_i * target - draft) at the next position. Where p_i is 1 and
    S_i is 0, the draft equals the target there, and a later token stands for certain.
    """
    either = missing + 1.0 - path_chance
    return torch.where(either > 0, missing / either, 1.0)


class BlockVerifier(SampledVerifier):
    """Each token has a coin of its own; the last one that stands ends the path, whatever became of
    those before it. The residual after token i is ``norm(relu(p_i * target - draft))``.

    Coins and drafts beyond the end have been looked at: they must be new in the next round.
    """

    takes_trees = False

    def judge(self, probs: RoundProbs, coins: Coins) -> Verdict:
        nodes_BD = probs.nodes()[:, 1:]
        target_BD, draft_BD = probs.target_of_tokens(), probs.draft_of_tokens()
        path_BN = path_chances(target_BD[:, 1:], draft_BD[:, 1:])
        chances_BD = self._stop_chances(probs, path_BN)
        stands_BD = stands(coins, chances_BD, nodes_BD) & probs.exists_BN[:, 1:]
        ends_B = (nodes_BD * stands_BD).amax(-1)
        return Verdict(ends_B, _residual(probs, path_BN, ends_B))

    def _stop_chances(self, probs: RoundProbs, path_BN: Tensor) -> Tensor:
        """float64 [B, D]; the last token of a draft stands with its path's chance, h_D = p_D."""
        chances = []
        for depth in range(1, path_BN.shape[1] - 1):
            nodes_B = torch.full_like(probs.roots_B, depth).where(probs.exists_BN[:, depth], 0)
            stop_B = stop_chance(path_BN[:, depth], _residual(probs, path_BN, nodes_B).sum(-1))
            goes_on_B = probs.exists_BN[:, depth + 1]
            chances.append(stop_B.where(goes_on_B, path_BN[:, depth]))
        return torch.stack([*chances, path_BN[:, -1]], dim=1)


def _residual(probs: RoundProbs, path_BN: Tensor, nodes_B: Tensor) -> Tensor:
    """float64 [B, V]."""
    chance_B1 = path_BN.gather(1, nodes_B[:, None])
    return residual(chance_B1 * probs.target(nodes_B), probs.draft(after(nodes_B, probs)))
