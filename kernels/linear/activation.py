"""Activations of feed-forward layers, gated (GLU variants, Shazeer 2020) and plain."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.dispatch import Backend, use_native, use_triton
from specengine.kernels.linear import activation_ref
from specengine.kernels.native import ops as native
from specengine.kernels.opaque import is_traced, opaque


def silu_and_mul(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """For each row [gate | up]: ``out[i] = silu(gate[i]) * up[i]``, silu rounded to x's dtype.

    x: [T, 2I], rows contiguous -> [T, I]. Any device; Triton on CUDA, C for few
    rows on a CPU.
    """
    if use_triton(backend, x):
        from specengine.kernels.linear import activation_triton

        return activation_triton.silu_and_mul(x)
    if use_native(backend, x):
        return native.silu_and_mul(x)
    return activation_ref.silu_and_mul(x)


def act_and_mul(x: Tensor, activation: str, *, backend: Backend = "auto") -> Tensor:
    """For each row [gate | up]: ``out[i] = act(gate[i]) * up[i]``, act rounded to x's dtype.

    x: [T, 2I], rows contiguous -> [T, I]. activation: a key of ACTIVATIONS. Any device; Triton on
    CUDA, for silu also C for few rows on a CPU.
    """
    if is_traced():
        traced: Tensor = _act_and_mul(x, activation)
        return traced
    if activation == "silu":
        return silu_and_mul(x, backend=backend)
    if activation in _TRITON and use_triton(backend, x):
        from specengine.kernels.linear import activation_triton

        return activation_triton.act_and_mul(x, activation)
    return activation_ref.act_and_mul(x, ACTIVATIONS[activation])


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
_TRITON = ("gelu_tanh", "gelu")


def _plain(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return activation_ref.silu_and_mul(x)
    return activation_ref.act_and_mul(x, ACTIVATIONS[activation])


_act_and_mul = opaque(
    "act_and_mul(Tensor x, str activation) -> Tensor",
    act_and_mul,
    lambda x, _: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
    _plain,
)
