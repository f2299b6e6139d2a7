"""The few-row operations in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.linear.activation_ref import silu_and_mul
from specengine.kernels.linear.norm_ref import rms_norm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    out = F.linear(rms_norm(x, norm_weight, eps), weight, bias)
    return out if out_dtype is None else out.to(out_dtype)


def norm_gated_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    return silu_and_mul(F.linear(rms_norm(x, norm_weight, eps), weight))


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    return residual + F.linear(x, weight, bias)
