"""Latents and rotated queries in Triton: a program takes some heads of one token, or its latent."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.attention.online_softmax_triton import to_fp8
from specengine.kernels.dispatch import has_dependent_launch

_HEADS = 8  # of a program


@triton.jit
def _stored(x, ptr, FP8: tl.constexpr):
    """As the cache holds it."""
    if FP8:
        kept = to_fp8(x, ptr)
    else:
        kept = x.to(ptr.dtype.element_ty)
    return kept


@triton.jit
def _latent_store_kernel(
    q_ptr,
    compressed_ptr,
    weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    out_ptr,
    cache_ptr,
    loc_ptr,
    stride_qt,
    stride_qh,
    stride_ct,
    stride_ot,
    stride_oh,
    stride_slot,
    stride_cos_sin,
    num_heads,
    eps,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HALF
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * stride_cos_sin
    cos = tl.load(angles + half, mask=in_half, other=0.0)
    sin = tl.load(angles + HALF + half, mask=in_half, other=0.0)
    first = half * 2 if PAIRS else half
    second = first + (1 if PAIRS else HALF)
    if block == tl.num_programs(1) - 1:
        source = compressed_ptr + token * stride_ct
        target = cache_ptr + tl.load(loc_ptr + token) * stride_slot
        cols = tl.arange(0, BLOCK_RANK)
        is_col = cols < RANK
        x = tl.load(source + cols, mask=is_col, other=0.0)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / RANK + eps)
        weight = tl.load(weight_ptr + cols, mask=is_col, other=0.0)
        normed = ((wide * scale).to(weight.dtype) * weight).to(x.dtype)
        tl.store(target + cols, _stored(normed, cache_ptr, FP8), mask=is_col)
        a = tl.load(source + RANK + first, mask=in_half, other=0.0).to(tl.float32)
        b = tl.load(source + RANK + second, mask=in_half, other=0.0).to(tl.float32)
        left, right = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
        tl.store(target + RANK + half, _stored(left, cache_ptr, FP8), mask=in_half)
        tl.store(target + RANK + HALF + half, _stored(right, cache_ptr, FP8), mask=in_half)
        return
    heads = block * HEADS + tl.arange(0, HEADS)
    cells = (heads < num_heads)[:, None] & in_half[None, :]
    source = q_ptr + token * stride_qt + heads[:, None] * stride_qh
    a = tl.load(source + first[None, :], mask=cells, other=0.0).to(tl.float32)
    b = tl.load(source + second[None, :], mask=cells, other=0.0).to(tl.float32)
    # Where q is rotated in place, a thread may write what another reads.
    tl.debug_barrier()
    target = out_ptr + token * stride_ot + heads[:, None] * stride_oh + half[None, :]
    element = out_ptr.dtype.element_ty
    tl.store(target, (a * cos[None, :] - b * sin[None, :]).to(element), mask=cells)
    tl.store(target + HALF, (b * cos[None, :] + a * sin[None, :]).to(element), mask=cells)


def latent_store(
    q: Tensor,
    compressed: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    has_pairs: bool,
    out: Tensor,
    cache: Tensor,
    loc: Tensor,
) -> None:
    tokens, num_heads, rope_dim = q.shape
    if tokens == 0:
        return
    rank = len(weight)
    dependent = has_dependent_launch(q)
    _latent_store_kernel[(tokens, triton.cdiv(num_heads, _HEADS) + 1)](
        q,
        compressed,
        weight,
        positions,
        cos_sin_cache,
        out,
        cache,
        loc,
        *q.stride()[:2],
        compressed.stride(0),
        *out.stride()[:2],
        cache.stride(0),
        cos_sin_cache.stride(0),
        num_heads,
        eps,
        RANK=rank,
        HALF=rope_dim // 2,
        PAIRS=has_pairs,
        FP8=cache.dtype != q.dtype,
        DEPENDENT=dependent,
        HEADS=_HEADS,
        BLOCK_RANK=triton.next_power_of_2(rank),
        BLOCK_HALF=triton.next_power_of_2(rope_dim // 2),
        num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )
