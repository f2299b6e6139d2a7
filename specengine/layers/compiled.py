"""What surrounds attention in a decoder layer, written plainly and given to torch.compile.

Attention itself stays with the backend, which torch.compile would not see through.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.kernels.linear.activation_ref import silu_and_mul
from specengine.kernels.linear.norm_ref import rms_norm


def before_attention(
    hidden: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """hidden, residual: [T, H] -> projections of the normed stream, [T, q + k + v], and the stream
    itself, [T, H]."""
    stream = hidden if residual is None else hidden + residual
    return F.linear(rms_norm(stream, norm_weight, eps), weight, bias), stream


def after_attention(
    heads: Tensor,
    stream: Tensor,
    output: tuple[Tensor, Tensor | None],
    norm_weight: Tensor,
    eps: float,
    gate_up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """heads: [T, num_heads * head_dim] -> what the feed-forward adds to the stream, and the stream
    before that, both [T, H]. Weights come with their biases."""
    normed, stream = norm_after_attention(heads, stream, output, norm_weight, eps)
    return F.linear(silu_and_mul(F.linear(normed, *gate_up)), *down), stream


def norm_after_attention(
    heads: Tensor,
    stream: Tensor,
    output: tuple[Tensor, Tensor | None],
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """heads: [T, num_heads * head_dim] -> what a feed-forward reads, and the stream, [T, H]."""
    stream = stream + F.linear(heads, *output)
    return rms_norm(stream, norm_weight, eps), stream


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The first shape is compiled for itself, the second for all that follow."""
    return torch.compile(function)
