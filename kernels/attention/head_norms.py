"""Norms of the heads of q and k right before attention, where no fused kernel computes them."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.attention.types import HeadNorms
from specengine.kernels.dispatch import Backend
from specengine.kernels.linear.norm import rms_norm


def norm_heads(
    q: Tensor, k: Tensor, norms: HeadNorms, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D], k [T, Hk, D], the last dimension contiguous, neither modified -> each head
    normalised by itself, contiguous. Any device; Triton on CUDA, which copies nothing before."""
    q = norm_each(q, norms.q_weight, norms.eps, backend=backend)
    return q, norm_each(k, norms.k_weight, norms.eps, backend=backend)


def norm_each(x: Tensor, weight: Tensor, eps: float, *, backend: Backend = "auto") -> Tensor:
    """x [T, heads, D], the last dimension contiguous."""
    if x.is_cuda:
        return rms_norm(x, weight, eps, backend=backend)
    # The native form takes rows.
    return rms_norm(x.reshape(-1, x.shape[2]), weight, eps, backend=backend).view(x.shape)
