"""The chosen experts of each row."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.experts import experts_ref
from specengine.kernels.experts.packed import PackedExpertWeights
from specengine.kernels.experts.types import Chosen, ExpertWeights


def experts(
    x: Tensor,
    chosen: Chosen,
    weights: ExpertWeights | PackedExpertWeights,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """For each row x, its k-th expert e and weight w::

        gate, up = halves of (weights.gate_up[e] @ x + gate_up_bias[e])
        part[k] = w * (weights.down[e] @ activation(gate, up) + down_bias[e])

    Inputs of both products are rounded first where the weights' format says so. Where
    weights.weighs_input: gate and up of ``w * x`` instead, and no w before the last product.

    x: [T, H] -> the sum of the parts, [T, H], or float32 [K, T, H] themselves, for RMSNorm.add.
    The parts are summed in their order, so that nothing depends on what runs first. Any device; on
    CUDA few rows by the format's own kernel where it takes them, others by Triton, very many by
    PyTorch's grouped product where the format widens weights for it: shapes and launches depend on
    T, not on what was chosen, and a row's result depends on T at most through the kernel and its
    tiles (tiles.py), not on other rows.
    """
    if backend == "auto" and isinstance(weights, PackedExpertWeights):
        few = weights.down.format.few
        if few is not None and few.takes(x, chosen, weights):
            return few.experts(x, chosen, weights)
    if use_triton(backend, x):
        from specengine.kernels.experts import experts_triton

        out: Tensor = experts_triton.experts(x, chosen, weights)
        return out
    return experts_ref.experts(x, chosen, weights)
