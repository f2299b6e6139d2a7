"""Linear layers whose weights are plain tensors until `pack_linears` puts them into the form that
the machine multiplies fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specengine.kernels import head_best, head_stream, head_topk, row_argmax, split_linear
from specengine.layers.norm import RMSNorm

_MAX_MEETING_ROWS = 4096  # rows whose best token one kernel finds


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

    _meeting: row_argmax.Meeting | None = None
    _slots: Tensor | None = None

    def tie(self, embedding: Tensor) -> None:
        """Use the embedding's own rows."""
        assert isinstance(embedding, nn.Parameter)
        self.weight = embedding

    def best(
        self, hidden: Tensor, norm: RMSNorm | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """The token of the largest logit of each row, the first among equals, int64 [R]; ids of
        that, where given. hidden: [R, H], before `norm`, where given."""
        if self._is_plain and head_stream.fits(hidden, self.plain):
            if self._slots is None:
                self._slots = head_best.slots_for(hidden.device)
            given = hidden, self.plain, self._slots, *_of(norm), ids
            return head_best.head_best(*given, backend="cuda")
        logits = self(hidden if norm is None else norm(hidden))
        if self._meeting is None:
            self._meeting = row_argmax.Meeting.of(_MAX_MEETING_ROWS, hidden.device)
        return row_argmax.row_argmax(logits, self._meeting, ids)

    def shares(
        self, hidden: Tensor, topk: int, norm: RMSNorm | None = None
    ) -> head_topk.Shares | None:
        """The topk best of each row and its log-sum-exp by share of the columns; None where logits
        are as fast. hidden: [R, H], before `norm`, where given."""
        if not self._is_plain or not head_topk.fits(hidden, self.plain, topk):
            return None
        return head_topk.head_topk(hidden, self.plain, topk, *_of(norm), backend="cuda")

    @property
    def _is_plain(self) -> bool:
        return self.kernel is None and self.bias is None


def _of(norm: RMSNorm | None) -> tuple[Tensor | None, float]:
    return (None, 0.0) if norm is None else (norm.weight, norm.eps)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
