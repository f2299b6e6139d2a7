"""Layers of random weights for the tests of kernels/linear/layer_tail.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels.dispatch import Backend
from specengine.kernels.linear.layer_tail import layer_tail
from specengine.kernels.linear.types import Projection, Tail, TailWeights

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    hidden: int
    heads: int
    intermediate: int
    qkv: int  # 0: no projection follows
    bias: bool = False

    def __str__(self) -> str:
        return f"{self.hidden}-{self.heads}-{self.intermediate}-{self.qkv}{'b' * self.bias}"


@dataclass(frozen=True)
class Layer:
    weights: TailWeights
    following: Projection | None

    @classmethod
    def draw(cls, case: Case, device: str, dtype: torch.dtype = torch.bfloat16) -> Layer:
        def matrix(outs: int, depth: int) -> Tensor:
            return (torch.randn(outs, depth, device=device) * depth**-0.5).to(dtype)

        def gain() -> Tensor:
            return (torch.rand(case.hidden, device=device) + 0.5).to(dtype)

        weights = TailWeights(
            matrix(case.hidden, case.heads),
            gain(),
            matrix(2 * case.intermediate, case.hidden),
            matrix(case.hidden, case.intermediate),
        )
        if not case.qkv:
            return cls(weights, None)
        bias = torch.randn(case.qkv, device=device).to(dtype) if case.bias else None
        return cls(weights, Projection(gain(), matrix(case.qkv, case.hidden), bias))

    def run(self, heads: Tensor, stream: Tensor, backend: Backend) -> Tail:
        return layer_tail(heads, stream, self.weights, EPS, self.following, backend=backend)


def rows_of(
    case: Case, count: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """heads and stream, with values between their rows that must not matter."""
    heads = torch.randn(count, case.heads + 16, device=device).to(dtype)[:, : case.heads]
    return heads, torch.randn(count, 2 * case.hidden, device=device).to(dtype)[:, case.hidden :]
