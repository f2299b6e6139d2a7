"""Block verification in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.accept.accept_rejection_ref import after, residual
from specengine.kernels.accept.accept_sampled_ref import Pick, Verdict, stands
from specengine.kernels.accept.types import SampledRound


def path_chances(target_BD: Tensor, draft_BD: Tensor) -> Tensor:
    """float64 [B, D + 1]: p_0 = 1, p_i = min(1, p_{i-1} * target_i / draft_i)."""
    chances = [torch.ones_like(target_BD[:, 0])]
    for target, draft in zip(target_BD.unbind(1), draft_BD.unbind(1), strict=True):
        wanted = chances[-1] * target
        ratio = torch.where(draft > 0, wanted / draft, (wanted > 0).double())
        chances.append(ratio.clamp(max=1.0))
    return torch.stack(chances, dim=1)


def stop_chance(path_chance: Tensor, missing: Tensor) -> Tensor:
    """h_i = S_i / (S_i + 1 - p_i): of stopping at a token, given that none after it is accepted.

    missing: S_i, the mass of relu(p_i * target - draft) at the next position. Where p_i is 1 and
    S_i is 0, the draft equals the target there, and a later token is certainly accepted.
    """
    either = missing + 1.0 - path_chance
    return torch.where(either > 0, missing / either, 1.0)


def judge(drafts: SampledRound, pick: Pick) -> Verdict:
    nodes_BD = drafts.nodes()[:, 1:]
    target_BD, draft_BD = drafts.target_of_tokens(), drafts.draft_of_tokens()
    path_BN = path_chances(target_BD[:, 1:], draft_BD[:, 1:])
    chances_BD = _stop_chances(drafts, path_BN)
    stands_BD = stands(pick, chances_BD, nodes_BD) & drafts.exists_BN[:, 1:]
    ends_B = (nodes_BD * stands_BD).amax(-1)
    return Verdict(ends_B, _residual(drafts, path_BN, ends_B))


def _stop_chances(drafts: SampledRound, path_BN: Tensor) -> Tensor:
    """float64 [B, D]; the last token of a draft is accepted with its path's chance, h_D = p_D."""
    chances = []
    for depth in range(1, path_BN.shape[1] - 1):
        nodes_B = torch.full_like(drafts.roots_B, depth).where(drafts.exists_BN[:, depth], 0)
        stop_B = stop_chance(path_BN[:, depth], _residual(drafts, path_BN, nodes_B).sum(-1))
        goes_on_B = drafts.exists_BN[:, depth + 1]
        chances.append(stop_B.where(goes_on_B, path_BN[:, depth]))
    return torch.stack([*chances, path_BN[:, -1]], dim=1)


def _residual(drafts: SampledRound, path_BN: Tensor, nodes_B: Tensor) -> Tensor:
    """float64 [B, V]."""
    chance_B1 = path_BN.gather(1, nodes_B[:, None])
    return residual(chance_B1 * drafts.target(nodes_B), drafts.draft(after(nodes_B, drafts)))
