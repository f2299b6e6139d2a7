"""Linear layers over bfloat16 weights on a CPU, compiled from linear.c."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specengine.kernels.native.library import library

PANEL = 32  # outputs side by side, as in linear.c

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def fits(weight: Tensor) -> bool:
    """Whether `pack` takes this weight [N, K] and the compiled form is there."""
    return (
        weight.device.type == "cpu"
        and weight.shape[0] % PANEL == 0
        and torch.cpu._is_avx512_supported()
        and library("linear") is not None
    )


def pack(weight: Tensor) -> Tensor:
    """[N, K], N a multiple of PANEL -> bfloat16 [N / PANEL, K, PANEL / 2, 2]: outputs PANEL / 2
    apart share a word."""
    panels = weight.to(torch.bfloat16).view(-1, 2, PANEL // 2, weight.shape[1])
    return panels.permute(0, 3, 2, 1).contiguous()


def linear(x: Tensor, panels: Tensor, bias: Tensor) -> Tensor:
    """``x @ weight.T + bias`` for the weight that `panels` was packed from, summed in float32.

    x: [T, K], float32 or bfloat16; bias: float32 [N] -> [T, N] of x's dtype. A row's result does
    not depend on the rows beside it.
    """
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = panels.shape[0] * PANEL
    y = x.new_empty(rows, outputs)
    x_panels_bias_y = (x.data_ptr(), panels.data_ptr(), bias.data_ptr(), y.data_ptr())
    sizes = (rows, inputs, outputs, torch.get_num_threads())
    if x.dtype == torch.float32:
        _function("linear_f32", 4)(*x_panels_bias_y, *sizes)
    else:
        wide_x = torch.empty(rows, inputs)
        _function("linear_bf16", 5)(*x_panels_bias_y, wide_x.data_ptr(), *sizes)
    return y


@cache
def _function(name: str, num_tensors: int) -> Any:
    function = getattr(library("linear"), name)
    function.argtypes, function.restype = [_P] * num_tensors + [_N, _N, _N, _I], None
    return function
