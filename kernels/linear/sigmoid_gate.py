"""What attention gives, times the sigmoid of a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specengine.kernels.custom_op import CustomOp
from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.linear import sigmoid_gate_ref
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.linear.rounded import MOST_COLUMNS, rounding_of


def sigmoid_gate(
    x: Tensor, gate: Tensor, *, into: Fp8Input | None = None, backend: Backend = "auto"
) -> Tensor:
    """``x * sigmoid(gate)``, the sigmoid rounded to the dtype.

    x: [T, M * E], rows contiguous; gate: [T, M, E] of x's dtype, the last dimension contiguous.
    Returns contiguous [T, M * E]. Any device; Triton on CUDA, for rows of up to MOST_COLUMNS. into:
    the form to which the rows' reader rounds them; where Triton's kernel can, it does so here
    (rounded.py).
    """
    rounds = rounding_of(into, x.shape[1])
    if rounds and use_triton(backend, x) and _SigmoidGate.takes_triton(x, gate):
        from specengine.kernels.linear import sigmoid_gate_triton

        return sigmoid_gate_triton.sigmoid_gate(x, gate, rounds)
    out: Tensor = _sigmoid_gate(x, gate, backend=backend)
    return out


class _SigmoidGate(CustomOp):
    schema = "sigmoid_gate(Tensor x, Tensor gate) -> Tensor"
    torch = staticmethod(sigmoid_gate_ref.sigmoid_gate)

    @staticmethod
    def fake(x: Tensor, gate: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @staticmethod
    def triton(*given: Any) -> Tensor:
        from specengine.kernels.linear import sigmoid_gate_triton

        return sigmoid_gate_triton.sigmoid_gate(*given)

    @staticmethod
    def takes_triton(x: Tensor, gate: Tensor) -> bool:
        has_rows = x.stride(1) == 1 and gate.stride(2) == 1 and x.dtype == gate.dtype
        return has_rows and x.shape[1] <= MOST_COLUMNS


_sigmoid_gate = _SigmoidGate()
