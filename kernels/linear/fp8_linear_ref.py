"""A product with an FP8 weight, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.linear.quantised import FP8, FP8_MAX, Fp8Input, Fp8Weight


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    rows = x.float()
    if weight.input is not None:
        codes, scale = quantise_rows(x, weight.input)
        group = x.shape[1] // scale.shape[1]
        rows = codes.float() * scale.repeat_interleave(group, 1)
    out = F.linear(rows, weight.dequantised(), None if bias is None else bias.float())
    return out.to(x.dtype)


def quantise_rows(x: Tensor, form: Fp8Input) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    if form.scale is not None:
        scale = form.scale.view(1, 1).repeat(rows, 1)
    else:
        group = form.group or columns
        groups = x.float().view(rows, columns // group, group)
        scale = (groups.abs().amax(2) / FP8_MAX).clamp_min(1e-12)
    parts = x.float().view(rows, scale.shape[1], columns // scale.shape[1]) / scale[:, :, None]
    codes = parts.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return codes.view(rows, columns), scale.to(torch.float32)
