"""Acceptance of trees in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.accept.accept_chain_ref import uniform
from specengine.kernels.accept.types import AcceptedPaths, RoundState, Simulated
from specengine.kernels.tree.types import DraftTree


def accept_tree(
    state: RoundState,
    rows_B: Tensor,
    chosen_BN: Tensor,
    tree: DraftTree,
    num_steps: int,
    context: int,
    simulated: Simulated | None,
) -> AcceptedPaths:
    lens_B = state.lens[rows_B]
    most_B = torch.full_like(lens_B, num_steps)
    if simulated is not None:
        most_B = (uniform(lens_B, rows_B) < simulated.part).long() + simulated.whole
    most_B = most_B.minimum(state.max_accepted[rows_B])
    node_B1 = torch.zeros_like(lens_B)[:, None]
    accepted_B, goes_on_B1 = torch.zeros_like(lens_B), torch.ones_like(node_B1).bool()
    path = [node_B1]
    for level in range(num_steps):
        fits = tree.parents_BN == node_B1
        if simulated is None:
            fits &= tree.tokens_BN == chosen_BN.gather(1, node_B1)
        goes_on_B1 = goes_on_B1 & fits.any(1, keepdim=True) & (level < most_B)[:, None]
        node_B1 = fits.int().argmax(1, keepdim=True).where(goes_on_B1, 0)
        accepted_B = accepted_B + goes_on_B1.squeeze(1)
        path.append(node_B1)
    return move_on(state, rows_B, chosen_BN, torch.cat(path, dim=1), accepted_B, context)


def move_on(
    state: RoundState,
    rows_B: Tensor,
    chosen_BN: Tensor,
    nodes_BW: Tensor,
    accepted_B: Tensor,
    context: int,
) -> AcceptedPaths:
    """By these paths."""
    lens_B = state.lens[rows_B]
    tokens_BW = chosen_BN.gather(1, nodes_BW)
    real = rows_B != 0
    bonus_B = tokens_BW.gather(1, accepted_B[:, None]).squeeze(1)
    state.lens[rows_B] = (lens_B + accepted_B + 1).clamp(max=context - 1).where(real, 0)
    state.roots[rows_B] = bonus_B.where(real, 0)
    outcome = torch.cat([accepted_B[:, None], tokens_BW, nodes_BW[:, 1:]], dim=1)
    state.outcomes[int(state.turn), : len(rows_B), : outcome.shape[1]] = outcome
    firsts_B = chosen_BN.shape[1] * torch.arange(len(rows_B), device=rows_B.device)
    rows_T = (firsts_B[:, None] + nodes_BW).flatten()
    return AcceptedPaths(accepted_B, tokens_BW, nodes_BW, rows_T)
