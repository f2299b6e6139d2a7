"""Losses between distributions, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specengine.draft.train.losses import LOSSES, Mixture


def draw(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    draft, target = 2 * torch.randn(2, 5, 11, dtype=torch.float64)
    return draft.requires_grad_(), target


def compare(weights: dict[str, float], draft: Tensor, target: Tensor) -> Tensor:
    return Mixture(weights)(draft, target.log_softmax(-1), target.argmax(-1))


def expected(name: str, draft: Tensor, target: Tensor) -> Tensor:
    draft_probs, target_probs = draft.softmax(-1), target.softmax(-1)
    overlap = torch.minimum(draft_probs, target_probs).sum(-1)
    return {
        "soft_cross_entropy": -(target_probs * draft_probs.log()).sum(-1),
        "hard_cross_entropy": -draft_probs[torch.arange(5), target.argmax(-1)].log(),
        "total_variation": 0.5 * (draft_probs - target_probs).abs().sum(-1),
        "log_acceptance": -overlap.log(),
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_values_are_those_of_the_definition(name: str) -> None:
    draft, target = draw(1)
    found = compare({name: 2.0}, draft, target)
    assert torch.allclose(found.double(), 2.0 * expected(name, draft, target), atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_going_down_the_gradient_meets_the_target(name: str) -> None:
    """Best tokens agree in the end, whatever the loss."""
    draft, target = draw(2)
    optimiser = torch.optim.Adam([draft], lr=0.1)
    for _ in range(200):
        compare({name: 1.0}, draft, target).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
    assert torch.equal(draft.argmax(-1), target.argmax(-1))


def test_a_mixture_is_a_weighted_sum() -> None:
    draft, target = draw(3)
    weights = {"soft_cross_entropy": 1.0, "total_variation": 0.25, "log_acceptance": 0.0}
    wanted = expected("soft_cross_entropy", draft, target)
    wanted = wanted + 0.25 * expected("total_variation", draft, target)
    assert torch.allclose(compare(weights, draft, target).double(), wanted, atol=1e-5)


def test_drafts_that_are_far_off_have_finite_gradients() -> None:
    draft = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    target = torch.tensor([[0.0, 200.0, 0.0]])
    for name in LOSSES:
        value = compare({name: 1.0}, draft, target)
        (gradient,) = torch.autograd.grad(value.sum(), draft)
        assert math.isfinite(float(value.detach()))
        assert bool(gradient.isfinite().all())
