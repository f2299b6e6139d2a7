"""Rotary position embedding (Su et al. 2021), joined with the write of new K and V, or alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specengine.kernels.attention import rope_ref
from specengine.kernels.custom_op import CustomOp
from specengine.kernels.dispatch import Backend
from specengine.kernels.native import ops as native


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Rotate q and k, write k and v into their slots, return the rotated q::

        for t in range(T):
            cos, sin = halves(cos_sin_cache[positions[t]])     # rotary_dim / 2 values each
            for head in (q[t], k[t]):                          # the first rotary_dim values
                first, second = halves(head)
                head = (first * cos - second * sin, second * cos + first * sin)   # in float32
            k_cache[loc[t]], v_cache[loc[t]] = k[t], v[t]

    q: [T, Hq, D], k and v: [T, Hk, D], the last dimension contiguous, none of them modified;
    positions and loc: int64 [T]; cos_sin_cache: float32 [P, rotary_dim], cos half then sin half,
    rotary_dim <= D, or None for no rotation; k_cache and v_cache: [S, Hk, D] of k's dtype, or
    float8_e4m3fn, to which values are rounded and clipped, the last dimension contiguous. Slots in
    loc are distinct, padding slot 0 excepted. Any device; Triton on CUDA.
    """
    out: Tensor = _rope_store_kv(
        q, k, v, positions, cos_sin_cache, k_cache, v_cache, loc, backend=backend
    )
    return out


def rotate_heads(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """The rotation of rope_store_kv alone: q [T, Hq, D] and k [T, Hk, D], the last dimension
    contiguous, neither modified -> both rotated, contiguous. Any device; Triton on CUDA."""
    q, k = _rotate_heads(q, k, positions, cos_sin_cache, backend=backend)
    return q, k


class _RopeStoreKv(CustomOp):
    torch = staticmethod(rope_ref.rope_store_kv)
    native = staticmethod(native.rope_store_kv)

    @staticmethod
    def triton(*given: Any) -> Tensor:
        from specengine.kernels.attention import rope_triton

        return rope_triton.rope_store_kv(*given)

    @staticmethod
    def takes_native(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor | None,
        k_cache: Tensor,
        *_: Tensor,
    ) -> bool:
        rotates = cos_sin_cache is not None and k_cache.dtype == k.dtype
        return rotates and native.side_by_side(q, k, v)


class _RotateHeads(CustomOp):
    schema = (
        "rotate_heads(Tensor q, Tensor k, Tensor positions, Tensor cos_sin_cache)"
        " -> (Tensor, Tensor)"
    )
    torch = staticmethod(rope_ref.rotate_heads)

    @staticmethod
    def fake(q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape)

    @staticmethod
    def triton(*given: Any) -> tuple[Tensor, Tensor]:
        from specengine.kernels.attention import rope_triton

        return rope_triton.rotate_heads(*given)


_rope_store_kv, _rotate_heads = _RopeStoreKv(), _RotateHeads()
