"""What a draft's distribution is compared by. Every loss takes two distributions over the draft
vocabulary, and gives float32 [C], in nats where it has a unit. The target's is renormalised there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST = 1e-6  # acceptance under which its logarithm is cut, so that gradients stay finite


@dataclass(frozen=True)
class Compared:
    """Two distributions, as logarithms, float32 [C, Vd], and the target's best token."""

    draft: Tensor
    target: Tensor
    best: Tensor  # int64 [C]


def soft_cross_entropy(x: Compared) -> Tensor:
    """Against the target's whole distribution."""
    return -(x.target.exp() * x.draft).sum(-1)


def hard_cross_entropy(x: Compared) -> Tensor:
    """Against the target's best token, which is all that greedy acceptance asks for."""
    return -x.draft.gather(-1, x.best[:, None])[:, 0]


def total_variation(x: Compared) -> Tensor:
    """1 - the chance that a sampled draft is accepted (Leviathan et al. 2023, section 3.2)."""
    return 1.0 - _acceptance(x)


def log_acceptance(x: Compared) -> Tensor:
    """Minus the logarithm of that chance: its gradient does not fade where drafts are bad."""
    return -_acceptance(x).clamp_min(_LEAST).log()


def _acceptance(x: Compared) -> Tensor:
    return torch.minimum(x.draft, x.target).exp().sum(-1)


LOSSES: dict[str, Callable[[Compared], Tensor]] = {
    "soft_cross_entropy": soft_cross_entropy,
    "hard_cross_entropy": hard_cross_entropy,
    "total_variation": total_variation,
    "log_acceptance": log_acceptance,
}


@dataclass(frozen=True)
class Mixture:
    """A weighted sum of losses, by their names in LOSSES."""

    weights: Mapping[str, float]

    def __call__(self, draft_logits: Tensor, target_log_probs: Tensor, best: Tensor) -> Tensor:
        """float [C, Vd] twice, int64 [C] -> float32 [C]."""
        compared = Compared(draft_logits.float().log_softmax(-1), target_log_probs.float(), best)
        parts = [weight * LOSSES[name](compared) for name, weight in self.weights.items() if weight]
        return torch.stack(parts).sum(0)
