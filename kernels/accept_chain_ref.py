"""Acceptance of chains in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_chain(
    chosen_BN: Tensor,
    drafts_BK: Tensor,
    rows_B: Tensor,
    lens: Tensor,
    roots: Tensor,
    context: int,
    forced_B: Tensor | None,
) -> Tensor:
    accepted = forced_B
    if accepted is None:
        accepted = (drafts_BK == chosen_BN[:, :-1]).cumprod(1).sum(1)
    moved = (lens[rows_B] + accepted + 1).clamp(max=context - 1)
    bonus = chosen_BN.gather(1, accepted[:, None]).squeeze(1)
    real = rows_B != 0
    lens[rows_B] = moved.where(real, lens[0])
    roots[rows_B] = bonus.where(real, roots[0])
    return torch.cat([accepted[:, None], chosen_BN], dim=1)
