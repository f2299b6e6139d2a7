"""Acceptance of chains in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.accept.types import Accepted, RoundState, Simulated


def begin_round(state: RoundState, rows_B: Tensor) -> tuple[Tensor, Tensor]:
    state.turn.copy_(1 - state.turn)
    return state.lens[rows_B], state.roots[rows_B]


def accept_chain(
    state: RoundState,
    rows_B: Tensor,
    chosen_BN: Tensor,
    drafts_BK: Tensor,
    context: int,
    simulated: Simulated | None,
) -> Tensor:
    lens_B = state.lens[rows_B]
    if simulated is None:
        accepted = (drafts_BK == chosen_BN[:, :-1]).cumprod(1).sum(1)
    else:
        accepted = (uniform(lens_B, rows_B) < simulated.part).long() + simulated.whole
        accepted = accepted.clamp(max=drafts_BK.shape[1])
    accepted = accepted.minimum(state.max_accepted[rows_B])
    real = rows_B != 0
    bonus = chosen_BN.gather(1, accepted[:, None]).squeeze(1)
    state.lens[rows_B] = (lens_B + accepted + 1).clamp(max=context - 1).where(real, 0)
    state.roots[rows_B] = bonus.where(real, 0)
    outcome = torch.cat([accepted[:, None], chosen_BN], dim=1)
    state.outcomes[int(state.turn), : len(rows_B), : outcome.shape[1]] = outcome
    return accepted


def commit_chain(
    state: RoundState, rows_B: Tensor, drafts_BK: Tensor, found: Accepted, context: int
) -> Tensor:
    ends_B, last_B = found.ends_B, found.tokens_B
    emitted_BN = torch.cat([drafts_BK, last_B[:, None]], dim=1)
    emitted_BN.scatter_(1, ends_B[:, None], last_B[:, None])
    real = rows_B != 0
    lens_B = state.lens[rows_B]
    state.lens[rows_B] = (lens_B + ends_B + 1).clamp(max=context - 1).where(real, 0)
    state.roots[rows_B] = last_B.where(real, 0)
    outcome = torch.cat([ends_B[:, None], emitted_BN], dim=1)
    state.outcomes[int(state.turn), : len(rows_B), : outcome.shape[1]] = outcome
    return emitted_BN


def uniform(lens_B: Tensor, rows_B: Tensor) -> Tensor:
    """In [0, 1), different for each round of each request."""
    x = (lens_B * 2654435761 + rows_B * 40503) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 2246822519) & 0xFFFFFFFF
    x = x ^ (x >> 13)
    return x.double() / 4294967296.0
