"""Acceptance of trees by coins in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_coins(chances_BNN: Tensor, uniforms_BN: Tensor) -> Tensor:
    return end_of_path((uniforms_BN[:, :, None] >= chances_BNN.cumsum(-1)).sum(-1))


def end_of_path(chosen_BN: Tensor) -> Tensor:
    """int64 [B]: where the walk from each root ends. chosen: the child to go on to, N for none."""
    width = chosen_BN.shape[1]
    nodes_N = torch.arange(width, device=chosen_BN.device)
    next_BN = torch.where(chosen_BN < width, chosen_BN, nodes_N)
    for _ in range((width - 1).bit_length()):
        next_BN = next_BN.gather(1, next_BN)
    return next_BN[:, 0]
