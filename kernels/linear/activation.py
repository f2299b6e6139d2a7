"""Activations of feed-forward layers, gated (GLU variants, Shazeer 2020) and plain."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.custom_op import CustomOp
from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.linear import activation_ref, rounded_cuda
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.linear.rounded import rounding_of
from specengine.kernels.native import ops as native


def silu_and_mul(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """For each row [gate | up]: ``out[i] = silu(gate[i]) * up[i]``, silu rounded to x's dtype.

    x: [T, 2I], rows contiguous -> [T, I]. Any device; Triton on CUDA, C for few
    rows on a CPU.
    """
    return act_and_mul(x, "silu", backend=backend)


def act_and_mul(
    x: Tensor, activation: str, *, into: Fp8Input | None = None, backend: Backend = "auto"
) -> Tensor:
    """For each row [gate | up]: ``out[i] = act(gate[i]) * up[i]``, act rounded to x's dtype.

    x: [T, 2I], rows contiguous -> [T, I]. activation: a key of ACTIVATIONS. Any device; Triton on
    CUDA, for silu also C for few rows on a CPU. into: the form to which the rows' reader rounds
    them; where a kernel can, it does so here (rounded.py), the one in CUDA C++ with Triton's bits.
    """
    if into is not None:
        width = x.shape[-1] // 2
        if activation == "silu" and rounded_cuda.takes(x, width, into, backend):
            return rounded_cuda.silu_and_mul(x)
        rounds = rounding_of(into, width)
        if rounds and activation in _TRITON and use_triton(backend, x):
            from specengine.kernels.linear import activation_triton

            return activation_triton.act_and_mul(x, activation, rounds)
    out: Tensor = _act_and_mul(x, activation, backend=backend)
    return out


def relu2(x: Tensor) -> Tensor:
    """The square of what is positive (So et al. 2021)."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU through tanh (Hendrycks and Gimpel 2016, section 2)."""
    return F.gelu(x, approximate="tanh")


# Of one tensor, any shape.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "relu2": relu2,
}
_TRITON = ("silu", "gelu_tanh", "gelu")


def _plain(x: Tensor, activation: str) -> Tensor:
    return activation_ref.act_and_mul(x, ACTIVATIONS[activation])


class _ActAndMul(CustomOp):
    schema = "act_and_mul(Tensor x, str activation) -> Tensor"
    torch = staticmethod(_plain)

    @staticmethod
    def fake(x: Tensor, activation: str) -> Tensor:
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def triton(x: Tensor, activation: str) -> Tensor:
        from specengine.kernels.linear import activation_triton

        if activation == "silu":
            return activation_triton.silu_and_mul(x)
        return activation_triton.act_and_mul(x, activation)

    @staticmethod
    def takes_triton(x: Tensor, activation: str) -> bool:
        return activation in _TRITON

    @staticmethod
    def native(x: Tensor, activation: str) -> Tensor:
        return native.silu_and_mul(x)

    @staticmethod
    def takes_native(x: Tensor, activation: str) -> bool:
        return activation == "silu"


_act_and_mul = _ActAndMul()
