"""Weights of tokens and draws from them on a CPU, compiled from sample.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specengine.kernels.native.library import library

_P, _N = ctypes.c_void_p, ctypes.c_int64
_SUFFIX = {torch.float32: "f32", torch.float64: "f64"}


def fits_exp(x: Tensor) -> bool:
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and x.is_contiguous()
        and library("sample") is not None
    )


def exp_below_(x: Tensor, constants: Sequence[float]) -> Tensor:
    """kernels/sample/sample_rows_ref.py's, in place. constants: LOWEST, LOG2_E, LN2_HIGH, LN2_LOW
    and SERIES."""
    _function("exp_below_f32", 3)(x.data_ptr(), x.numel(), _floats(tuple(constants)))
    return x


def fits_weights(weights: Tensor, uniforms: Tensor) -> bool:
    return (
        weights.is_cpu
        and weights.dtype in _SUFFIX
        and weights.stride(-1) == 1
        and uniforms.dtype == torch.float64
        and uniforms.is_contiguous()
        and library("sample") is not None
    )


def invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """kernels/sample/sample_rows_ref.py's. weights [R, V], rows any distance apart; uniforms
    float64 [R] -> int64 [R]."""
    rows, width = weights.shape
    out = torch.empty(rows, dtype=torch.int64)
    _function(f"invert_cdf_{_SUFFIX[weights.dtype]}", 6)(
        weights.data_ptr(), weights.stride(0), uniforms.data_ptr(), out.data_ptr(), rows, width
    )
    return out


@cache
def _floats(values: tuple[float, ...]) -> Any:
    return (ctypes.c_float * len(values))(*values)


_ARGUMENTS = {3: [_P, _N, _P], 6: [_P, _N, _P, _P, _N, _N]}


@cache
def _function(name: str, num_arguments: int) -> Any:
    function = getattr(library("sample"), name)
    function.argtypes, function.restype = _ARGUMENTS[num_arguments], None
    return function
