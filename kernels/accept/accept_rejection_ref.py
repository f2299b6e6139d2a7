"""Token-level rejection in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.accept.accept_sampled_ref import Pick, Verdict, stands
from specengine.kernels.accept.types import SampledRound


def accept_chance(target: Tensor, draft: Tensor) -> Tensor:
    """min(1, target / draft): a uniform u < 1 lies below it exactly where ``u * draft < target``,
    so that a token which the target never says is never accepted."""
    ratio = torch.where(draft > 0, target / draft, (target > 0).double())
    return ratio.clamp(max=1.0)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """What the target says and the draft does not, up to a factor."""
    return (target - draft).relu()


def judge(drafts: SampledRound, pick: Pick) -> Verdict:
    chances_BD = accept_chance(drafts.target_of_tokens(), drafts.draft_of_tokens())[:, 1:]
    stands_BD = stands(pick, chances_BD, drafts.nodes()[:, 1:]) & drafts.exists_BN[:, 1:]
    ends_B = stands_BD.long().cumprod(-1).sum(-1)
    draft_BV = drafts.draft(after(ends_B, drafts))
    return Verdict(ends_B, residual(drafts.target(ends_B), draft_BV))


def after(ends_B: Tensor, drafts: SampledRound) -> Tensor:
    """The next node of each chain, or the last of the row where there is none."""
    return (ends_B + 1).clamp(max=drafts.tokens_BN.shape[1] - 1)
