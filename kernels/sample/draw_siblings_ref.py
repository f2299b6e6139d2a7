"""Draws without replacement in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.sample.sample_rows_ref import LEAST_WEIGHT, invert_cdf


def draw_siblings(weights_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
    left_RV, scaled_RV, tokens = weights_RV, weights_RV, list[Tensor]()
    for rank, uniforms_R in enumerate(uniforms_RK.unbind(1)):
        if rank:
            left_RV = left_RV.scatter(1, tokens[-1].clamp(min=0), 0.0)
            # Weights are rounded to units of the best one's: what is left may be tiny.
            largest_R1 = left_RV.amax(-1, keepdim=True).double()
            scaled_RV = left_RV.double() * (1.0 / largest_R1.clamp(min=LEAST_WEIGHT))
        token_R1 = invert_cdf(scaled_RV, uniforms_R)[:, None]
        tokens.append(token_R1.where(left_RV.gather(1, token_R1) > 0, -1))
    return torch.cat(tokens, dim=1)
