"""Linear layers whose weights are plain tensors until `pack_linears` puts them into the form that
the machine multiplies fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specengine.kernels.linear import split_linear


class LinearKernel(Protocol):
    """A packed weight: maps [T, in] to [T, out], bias included."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Linear(nn.Module):
    """y = x W^T + b, with W [out_features, in_features] stored as in checkpoints."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.out_features = out_features
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None
        self.kernel: LinearKernel | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features]."""
        if self.kernel is not None:
            return self.kernel(x)
        return F.linear(x, self.plain, self.bias)

    def parts(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features] or, where that is faster, float32
        [P, T, out_features], whose sum that is; for RMSNorm.add."""
        if self.kernel is None and self.bias is None and split_linear.fits(x, self.plain):
            return split_linear.split_linear(x, self.plain)
        out: Tensor = self(x)
        return out

    @property
    def plain(self) -> Tensor:
        """The weight of a layer that has not been packed."""
        assert self.weight is not None, "the weight was packed for the CPU"
        return self.weight

    def use_kernel(self, kernel: LinearKernel) -> None:
        """Multiply with `kernel` from now on, and let go of the plain weight."""
        self.kernel = kernel
        self.weight = None


class MergedLinear(Linear):
    """Several linear layers of one input as one product; their outputs stand side by side.

    Checkpoints keep them apart: `shards` cuts a parameter into the parts they fill.
    """

    def __init__(self, in_features: int, shard_sizes: Sequence[int], bias: bool = False) -> None:
        super().__init__(in_features, sum(shard_sizes), bias)
        self.shard_sizes = list(shard_sizes)

    def shards(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """Views of `parameter` (weight or bias), one a merged layer."""
        return torch.split(parameter, self.shard_sizes)


class LMHead(Linear):
    """The output projection. Weight-only quantization keeps more bits here than elsewhere."""

    def tie(self, embedding: Tensor) -> None:
        """Use the embedding's own rows."""
        assert isinstance(embedding, nn.Parameter)
        self.weight = embedding


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
