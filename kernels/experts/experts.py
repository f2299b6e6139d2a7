"""The chosen experts of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.experts import experts_ref
from specengine.kernels.experts.packed import FewRows, PackedExpertWeights
from specengine.kernels.experts.types import Chosen, ExpertWeights


def experts(
    x: Tensor,
    chosen: Chosen,
    weights: ExpertWeights | PackedExpertWeights,
    into: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """For each row x, its k-th expert e and weight w::

        gate, up = halves of (weights.gate_up[e] @ x + gate_up_bias[e])
        part[k] = w * (weights.down[e] @ activation(gate, up) + down_bias[e])

    Inputs of both products are rounded first where the weights' format says so. Where
    weights.weighs_input: gate and up of ``w * x`` instead, and no w before the last product.

    x: [T, H] -> the sum of the parts, [T, H], or float32 [P, T, H] themselves, for RMSNorm.add.
    into: from `room_for_parts`, whose first parts are filled and are what is returned.
    The parts are summed in their order, so that nothing depends on what runs first. Any device; on
    CUDA few rows by the format's own kernel where it takes them, others by Triton, very many by
    PyTorch's grouped product where the format widens weights for it: shapes and launches depend on
    T, not on what was chosen, and a row's result depends on T at most through the kernel and its
    tiles (tiles.py), not on other rows.
    """
    if isinstance(weights, PackedExpertWeights) and backend == "auto":
        few = _few(x, chosen.ids_TK.shape[1], weights)
        if few is not None:
            return few.experts(x, chosen, weights, into=into)
    if use_triton(backend, x):
        from specengine.kernels.experts import experts_triton

        out: Tensor = experts_triton.experts(x, chosen, weights, into=into)
        return out
    assert into is None, "without a kernel there is room for no parts"
    return experts_ref.experts(x, chosen, weights)


def room_for_parts(
    x: Tensor,
    num_chosen: int,
    weights: ExpertWeights | PackedExpertWeights,
    more: int,
    *,
    backend: Backend = "auto",
) -> Tensor | None:
    """float32 [P + more, T, H] for the P parts that `experts` gives of such rows of num_chosen
    experts each, and behind them for others that the norm adds up with them; None where `experts`
    gives the sum."""
    count = 0
    if (
        backend == "auto"
        and isinstance(weights, PackedExpertWeights)
        and _few(x, num_chosen, weights)
    ):
        count = num_chosen
    elif use_triton(backend, x):
        from specengine.kernels.experts import experts_triton

        count = experts_triton.num_parts(len(x), num_chosen, weights)
    size = count + more, *x.shape
    return torch.empty(size, dtype=torch.float32, device=x.device) if count else None


def _few(x: Tensor, num_chosen: int, weights: PackedExpertWeights) -> FewRows | None:
    """The format's own kernel, if it takes these rows."""
    few = weights.down.format.few
    return few if few is not None and few.takes(x, num_chosen, weights) else None
