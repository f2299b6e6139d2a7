"""The compiled operations on tensors. The public functions beside this folder say what each does,
and call these where `fits` allows."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specengine.kernels.native.library import library

# One thread does the work: beyond this, PyTorch's many are faster.
MAX_ROWS = 32

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "add_rms_norm": [_P, _I, _P, _I, _P, _P, _P, _I, _I, _F],
    "silu_and_mul": [_P, _I, _P, _I, _I],
    "rope_store_kv": [_P, _I, _P, _I, _P, _I, _P, _P, _I, _P, _P, _P, _P, _I, _I, _I, _I],
    "attend_decode": [_P, _P, _P, _P, _I, _P, _P, _P, _P, _P, _I, _I, _I, _I, _F, _F],
}


@cache
def _function(name: str, dtype: torch.dtype) -> Any:
    lib = library()
    assert lib is not None
    function = getattr(lib, f"{name}_{_SUFFIX[dtype]}")
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return function


def fits(x: Tensor) -> bool:
    """Whether the compiled form is there and the faster one for rows x [T, ...], whose last
    dimension must be contiguous."""
    return (
        x.is_cpu
        and 0 < x.shape[0] <= MAX_ROWS
        and x.dtype in _SUFFIX
        and x.stride(-1) == 1
        and library() is not None
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H]."""
    rows, hidden = x.shape
    out = x.new_empty(rows, hidden)
    _function("add_rms_norm", x.dtype)(
        x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), None, out.data_ptr(), rows, hidden,
        eps,
    )  # fmt: skip
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x and residual [T, H]."""
    rows, hidden = x.shape
    both = x.new_empty(2, rows, hidden)
    total, out = both.unbind(0)
    _function("add_rms_norm", x.dtype)(
        x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(),
        total.data_ptr(), out.data_ptr(), rows, hidden, eps,
    )  # fmt: skip
    return out, total


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2I]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    _function("silu_and_mul", x.dtype)(x.data_ptr(), x.stride(0), out.data_ptr(), rows, width)
    return out


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
) -> Tensor:
    """q [T, Hq, D], k and v [T, Hk, D] with heads side by side; contiguous caches."""
    tokens, q_heads, head_dim = q.shape
    out = q.new_empty(tokens, q_heads, head_dim)
    _function("rope_store_kv", q.dtype)(
        q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
        positions.data_ptr(), cos_sin_cache.data_ptr(), cos_sin_cache.shape[1],
        k_cache.data_ptr(), v_cache.data_ptr(), loc.data_ptr(), out.data_ptr(), tokens, q_heads,
        k.shape[1], head_dim,
    )  # fmt: skip
    return out


def side_by_side(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the heads of a row lie one after the other, as rope_store_kv reads them."""
    return q.stride(1) == k.stride(1) == v.stride(1) == q.shape[2]


def attend_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    begins: Tensor,
    ends: Tensor,
    scratch: Tensor,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """q [B, Hq, D] contiguous, one query a request over its tokens begins .. ends - 1 (int64 [B]),
    whose slots are in row rows[b] of req_to_token (int32). scratch: float32, the longest end
    plus 2 D -> [B, Hq, D]."""
    requests, q_heads, head_dim = q.shape
    out = q.new_empty(requests, q_heads, head_dim)
    _function("attend_decode", q.dtype)(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), req_to_token.data_ptr(),
        req_to_token.stride(0), rows.data_ptr(), begins.data_ptr(), ends.data_ptr(),
        out.data_ptr(), scratch.data_ptr(), requests, q_heads, k_cache.shape[1],
        head_dim, scale, softcap or 0.0,
    )  # fmt: skip
    return out
