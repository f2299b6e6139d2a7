"""Draws several tokens from each row of weights, without replacement."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.sample import draw_siblings_ref, row_cluster


def draw_siblings(weights_RV: Tensor, uniforms_RK: Tensor, *, backend: Backend = "auto") -> Tensor:
    """K tokens of each row, in the order drawn, int64 [R, K]::

        left, scale = weights, 1
        for k in range(K):
            weight = floor(left * scale * 2^43)
            if not any(weight): token[k] = -1    # nor is there any later one
            token[k] = first with weight[0] + .. + weight[token] > floor(u[k] * sum(weight))
            left[token[k]] = 0
            scale = 1 / max(left)                # in float64: what is left may be tiny

    Sums are those of integers, exact in any order: no bit depends on other rows, nor on the device.

    weights_RV: float32, rows contiguous; 0, or 2^-43 to 1. uniforms_RK: float64 in [0, 1). Any
    device; on CUDA Triton, and of few rows on Hopper a cluster of blocks each ("cuda").
    """
    if row_cluster.takes(backend, weights_RV):
        from specengine.kernels.sample import draw_siblings_cuda

        return draw_siblings_cuda.draw_siblings(weights_RV, uniforms_RK)
    if use_triton(backend, weights_RV):
        from specengine.kernels.sample import draw_siblings_triton

        return draw_siblings_triton.draw_siblings(weights_RV, uniforms_RK)
    return draw_siblings_ref.draw_siblings(weights_RV, uniforms_RK)
