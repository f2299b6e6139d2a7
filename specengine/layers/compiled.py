"""What surrounds attention in a decoder layer, written plainly and given to torch.compile.

Attention itself stays with the backend, which torch.compile would not see through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.kernels.linear.activation import ACTIVATIONS
from specengine.kernels.linear.norm_ref import rms_norm
from specengine.layers.linear import Linear
from specengine.layers.norm import LayerNorm, Norm


@dataclass(frozen=True)
class NormWeights:
    """layers.norm, as tensors: gain and bias [H]."""

    gain: Tensor
    bias: Tensor | None
    eps: float
    is_layer_norm: bool

    @classmethod
    def of(cls, norm: Norm | None) -> NormWeights | None:
        if norm is None:
            return None
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        return cls(norm.weight, bias, norm.eps, isinstance(norm, LayerNorm))

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_layer_norm:
            return rms_norm(x, self.gain, self.eps)
        bias = None if self.bias is None else self.bias.float()
        normed = F.layer_norm(x.float(), self.gain.shape, self.gain.float(), bias, self.eps)
        return normed.to(x.dtype)


@dataclass(frozen=True)
class LinearWeights:
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, linear: Linear) -> LinearWeights:
        """The weights of a layer that multiplies a plain weight."""
        return cls(linear.plain, linear.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class LayerTensors:
    """A decoder layer without its attention. Norms that it lacks are None; stream_scale: of the
    stream, where it is read without a norm. up: gate and up as one where is_gated; None, and down
    too, in a layer of experts, which run outside."""

    input_norm: NormWeights | None
    attention_out_norm: NormWeights | None
    middle_norm: NormWeights | None
    mlp_out_norm: NormWeights | None
    qkv: LinearWeights
    out: LinearWeights
    up: LinearWeights | None
    down: LinearWeights | None
    activation: str
    is_gated: bool
    side_by_side: bool  # feed-forward reads the stream that attention reads
    stream_scale: float

    def read(self, norm: NormWeights | None, stream: Tensor) -> Tensor:
        return stream * self.stream_scale if norm is None else norm(stream)

    def feed_forward(self, x: Tensor) -> Tensor:
        assert self.up is not None
        assert self.down is not None
        act, up = ACTIVATIONS[self.activation], self.up(x)
        if self.is_gated:
            gate, up = up.chunk(2, -1)
            return self.down(act(gate) * up)
        return self.down(act(up))


def before_attention(
    hidden: Tensor, residual: Tensor | None, layer: LayerTensors
) -> tuple[Tensor, Tensor]:
    """hidden, residual: [T, H] -> projections of what attention reads, [T, q + k + v], and the
    stream itself, [T, H]."""
    stream = hidden if residual is None else hidden + residual
    return layer.qkv(layer.read(layer.input_norm, stream)), stream


def after_attention(heads: Tensor, stream: Tensor, layer: LayerTensors) -> tuple[Tensor, Tensor]:
    """heads: [T, num_heads * head_dim] -> what the feed-forward adds to the stream, and the stream
    before that, both [T, H]."""
    read, stream = behind_attention(heads, stream, layer)
    added = layer.feed_forward(read)
    return added if layer.mlp_out_norm is None else layer.mlp_out_norm(added), stream


def behind_attention(heads: Tensor, stream: Tensor, layer: LayerTensors) -> tuple[Tensor, Tensor]:
    """heads: [T, num_heads * head_dim] -> what the feed-forward reads, and the stream, both
    [T, H]."""
    attended = layer.out(heads)
    if layer.attention_out_norm is not None:
        attended = layer.attention_out_norm(attended)
    if layer.side_by_side:
        norm = layer.input_norm if layer.middle_norm is None else layer.middle_norm
        return layer.read(norm, stream), stream + attended
    stream = stream + attended
    return layer.read(layer.middle_norm, stream), stream


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The first shape is compiled for itself, the second for all that follow."""
    return torch.compile(function)
