"""Root-mean-square norm of each head, times a gate: what follows linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.custom_op import CustomOp
from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.linear import gated_norm_ref
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.linear.rounded import MOST_COLUMNS, NOT_ROUNDED, WHOLE_ROWS, rounding_of


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    into: Fp8Input | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """For each head x of size E, with its gate::

        normed = x / sqrt(mean(x * x) + eps)                    # float32, rounded to gate's dtype
        out = round(weight * normed) * silu(gate)               # the product in float32, rounded

    x: float32 [T, M, E], contiguous; gate: [T, M, E], the last dimension contiguous; weight: [E].
    Returns contiguous [T, M * E] of gate's dtype. A row's bits do not depend on other rows. Any
    device; Triton on CUDA, for rows of up to MOST_COLUMNS, padded to powers of 2. into: the form
    to which the rows' reader rounds them; where Triton's kernel can, it does so here (rounded.py).
    """
    if rounds := _rounds(x, gate, weight, into, backend):
        from specengine.kernels.linear import gated_norm_triton

        return gated_norm_triton.gated_norm(x, gate, weight, eps, rounds)
    out: Tensor = _gated_norm(x, gate, weight, eps, backend=backend)
    return out


def _rounds(
    x: Tensor, gate: Tensor, weight: Tensor, into: Fp8Input | None, backend: Backend
) -> int:
    """By groups where heads are not padded: their places follow each other then."""
    found = rounding_of(into, x.shape[1] * x.shape[2])
    follows = found == WHOLE_ROWS or x.shape[2] == _padded(x.shape[2])
    if not found or not follows or not use_triton(backend, x):
        return NOT_ROUNDED
    return found if _GatedNorm.takes_triton(x, gate, weight, 0.0) else NOT_ROUNDED


class _GatedNorm(CustomOp):
    schema = "gated_norm(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor"
    torch = staticmethod(gated_norm_ref.gated_norm)

    @staticmethod
    def fake(x: Tensor, gate: Tensor, *_: object) -> Tensor:
        return gate.new_empty(x.shape[0], x.shape[1] * x.shape[2])

    @staticmethod
    def triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        from specengine.kernels.linear import gated_norm_triton

        return gated_norm_triton.gated_norm(x, gate, weight, eps)

    @staticmethod
    def takes_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> bool:
        padded = _padded(x.shape[1]) * _padded(x.shape[2])
        is_plain = x.dtype == torch.float32 and x.is_contiguous() and gate.stride(2) == 1
        has_gain = weight.is_contiguous() and weight.dtype in (gate.dtype, torch.float32)
        return is_plain and has_gain and padded <= MOST_COLUMNS


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


_gated_norm = _GatedNorm()
