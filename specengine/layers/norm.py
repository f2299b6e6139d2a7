"""Normalisation: root mean square, and LayerNorm."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.core.parallel import Cut
from specengine.kernels.attention.head_norms import norm_each
from specengine.kernels.linear.norm import fused_add_rms_norm, rms_norm, sum_add_rms_norm
from specengine.kernels.linear.quantised import Fp8Input
from specengine.layers.module import Module

if TYPE_CHECKING:
    from specengine.layers.layer_spec import LayerSpec


@dataclass(frozen=True)
class NormPlaces:
    """Which norms a layer has: before attention, before feed-forward, behind each. side_by_side:
    feed-forward reads the stream that attention reads, by its own norm or the same."""

    before: bool
    between: bool
    behind: bool
    side_by_side: bool = False


NORM_PLACES: dict[str, NormPlaces] = {
    "before": NormPlaces(True, True, False),
    "around": NormPlaces(True, True, True),
    "after": NormPlaces(False, False, True),
    "shared": NormPlaces(True, False, False, side_by_side=True),
    "parallel": NormPlaces(True, True, False, side_by_side=True),
}


class Norm(Module):
    """A norm over the last dimension, with a gain a place. offset: added to the gain when it is
    loaded; the sum is kept in float32, in which checkpoints with an offset mean it."""

    def __init__(self, size: int | torch.Size, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        dtype = torch.float32 if offset else None
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps
        self.offset = offset

    @abstractmethod
    def add(
        self,
        x: Tensor,
        residual: Tensor | None,
        into: Fp8Input | None = None,
        awaited: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(normed sum, sum) of a layer's output and the residual stream. Without a residual, the
        stream starts here with x. x: [T, H], or float32 [P, T, H], its parts (Linear.parts).
        into: Linear.takes of what reads the first; a norm may round it to that, too. awaited:
        Linear.waits of it, where nothing else does."""

    def stream(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The sum alone."""
        if residual is None:
            return x
        return x + residual if x.dim() == 2 else x.sum(0).to(residual.dtype) + residual

    def of_heads(self, x: Tensor) -> Tensor:
        """[T, heads * size], each head normalised by itself."""
        normed: Tensor = self(x.reshape(-1, len(self.weight)))
        return normed.view(x.shape)


class RMSNorm(Norm):
    """x / rms(x) * weight (Zhang and Sennrich 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def of_heads(self, x: Tensor) -> Tensor:
        size = len(self.weight)
        heads = x.view(len(x), x.shape[1] // size, size)
        return norm_each(heads, self.weight, self.eps).flatten(1)

    def add(
        self,
        x: Tensor,
        residual: Tensor | None,
        into: Fp8Input | None = None,
        awaited: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            return rms_norm(x, self.weight, self.eps, into=into, awaited=awaited), x
        if x.dim() == 3:
            return sum_add_rms_norm(x, residual, self.weight, self.eps, into=into)
        given = x, residual, self.weight, self.eps
        return fused_add_rms_norm(*given, into=into, awaited=awaited)

    def stream(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The sum alone, in one kernel where x is in parts."""
        if residual is not None and x.dim() == 3:
            return self.add(x, residual)[1]
        return super().stream(x, residual)


class PartNorm(RMSNorm):
    """RMSNorm over features of which each rank has a part: `scaled` takes the sum of the squares of
    all, to which `squares` is what this rank adds. copies: ranks that have the same part."""

    def __init__(self, part: Cut, copies: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(part.size, eps, offset)
        self.part, self.copies = part, copies

    def cuts(self, kind: str) -> Sequence[Cut | None]:
        """As layers.linear.Linear has it."""
        return [self.part]

    def squares(self, x: Tensor) -> Tensor:
        """[T, features here] -> float32 [T]."""
        return x.float().square().sum(-1) / self.copies

    def scaled(self, x: Tensor, squares_T: Tensor) -> Tensor:
        factor_T1 = torch.rsqrt(squares_T / self.part.whole + self.eps)[:, None]
        normed = (x.float() * factor_T1).to(self.weight.dtype)
        return (normed * self.weight).to(x.dtype)


class LayerNorm(Norm):
    """(x - mean(x)) / deviation(x) * weight + bias (Ba et al. 2016), in float32."""

    def __init__(
        self, size: int | torch.Size, eps: float, offset: float = 0.0, has_bias: bool = False
    ) -> None:
        super().__init__(size, eps, offset)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        normed = F.layer_norm(x.float(), self.weight.shape, self.weight.float(), bias, self.eps)
        return normed.to(x.dtype)

    def add(
        self,
        x: Tensor,
        residual: Tensor | None,
        into: Fp8Input | None = None,
        awaited: bool = False,
    ) -> tuple[Tensor, Tensor]:
        stream = self.stream(x, residual)
        return self(stream), stream


class HeadNorm(LayerNorm):
    """LayerNorm of each head by itself, without bias, with gains of its own: weight [heads, size].
    heads: those that this rank has."""

    def __init__(self, heads: Cut, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(torch.Size([heads.size, size]), eps, offset)
        self.heads = heads

    def cuts(self, kind: str) -> Sequence[Cut | None]:
        """As layers.linear.Linear has it."""
        return [self.heads]

    def of_heads(self, x: Tensor) -> Tensor:
        heads = x.float().view(len(x), *self.weight.shape)
        normed = F.layer_norm(heads, heads.shape[-1:], eps=self.eps) * self.weight.float()
        return normed.to(x.dtype).view(x.shape)


@dataclass(frozen=True)
class PreNorms:
    """The norms of a layer with RMS norms: before attention, and before feed-forward."""

    input: RMSNorm
    middle: RMSNorm


def make_norm(spec: LayerSpec, size: int, eps: float) -> Norm:
    """The one that a layer's description asks for."""
    if spec.norm == "rms":
        return RMSNorm(size, eps, spec.norm_offset)
    if spec.norm in ("layer", "layer_bias"):
        return LayerNorm(size, eps, spec.norm_offset, spec.norm == "layer_bias")
    raise ModelLoadError(f"norm {spec.norm!r} is not supported; known: rms, layer, layer_bias")
