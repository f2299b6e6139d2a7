"""Rotary embedding, with the KV write and alone, in Triton: a program takes a few heads of one
token."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.attention.online_softmax_triton import to_fp8
from specengine.kernels.dispatch import has_dependent_launch

_HEADS = 8  # of a program: enough to be worth its start, and the angles read once


@triton.jit
def _rotated(x, head_ptrs, cos_sin_ptr, cols, mask, rotary_dim):
    """Heads [G, BLOCK] with their first rotary_dim values rotated, in float32. head_ptrs: [G];
    cols: [BLOCK] places; x: what lies there."""
    half = rotary_dim // 2
    is_rotary = cols < rotary_dim
    is_first = cols < half
    partner = tl.where(is_first, cols + half, cols - half)
    angle = tl.where(is_first, cols, cols - half)
    cells = mask & is_rotary[None, :]
    other = tl.load(head_ptrs[:, None] + partner[None, :], mask=cells, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin_ptr + angle, mask=is_rotary, other=0.0)
    sin = tl.load(cos_sin_ptr + half + angle, mask=is_rotary, other=0.0)
    signed = tl.where(is_first[None, :], -other, other)
    return x.to(tl.float32) * cos[None, :] + signed * sin[None, :]


@triton.jit
def _rope_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    loc_ptr,
    out_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ks,
    stride_kc,
    stride_vs,
    stride_vc,
    stride_cos_sin,
    num_q_heads,
    num_heads,
    head_dim,
    rotary_dim,
    ROTATE: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, BLOCK)
    mask = (heads < num_heads)[:, None] & (cols < head_dim)[None, :]
    is_q = heads < num_q_heads
    kv_heads = heads - num_q_heads
    slot = tl.load(loc_ptr + token)
    q_heads = q_ptr + token * stride_qt + heads * stride_qh
    sources = tl.where(is_q, q_heads, k_ptr + token * stride_kt + kv_heads * stride_kh)
    outs = out_ptr + (token * num_q_heads + heads) * head_dim
    k_heads = k_cache_ptr + slot * stride_ks + kv_heads * stride_kc
    x = tl.load(sources[:, None] + cols[None, :], mask=mask, other=0.0)
    if ROTATE:
        angles = cos_sin_ptr + tl.load(positions_ptr + token) * stride_cos_sin
        rotated = _rotated(x, sources, angles, cols, mask, rotary_dim)
        x = tl.where((cols < rotary_dim)[None, :], rotated.to(x.dtype), x)
    is_v = mask & (kv_heads >= 0)[:, None]
    if FP8:
        tl.store(outs[:, None] + cols[None, :], x, mask=mask & is_q[:, None])
        tl.store(k_heads[:, None] + cols[None, :], to_fp8(x, k_cache_ptr), mask=is_v)
    else:
        targets = tl.where(is_q, outs, k_heads)
        tl.store(targets[:, None] + cols[None, :], x, mask=mask)
    v_heads = v_ptr + token * stride_vt + kv_heads * stride_vh
    v = tl.load(v_heads[:, None] + cols[None, :], mask=is_v, other=0.0)
    kept = v_cache_ptr + slot * stride_vs + kv_heads * stride_vc
    if FP8:
        v = to_fp8(v, v_cache_ptr)
    tl.store(kept[:, None] + cols[None, :], v, mask=is_v)


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
) -> Tensor:
    tokens, num_q_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    rotate = cos_sin_cache is not None
    dependent = has_dependent_launch(q)
    num_heads = num_q_heads + k.shape[1]
    _rope_store_kernel[(tokens, triton.cdiv(num_heads, _HEADS))](
        q,
        k,
        v,
        positions,
        cos_sin_cache if rotate else positions,
        k_cache,
        v_cache,
        loc,
        out,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        cos_sin_cache.stride(0) if cos_sin_cache is not None else 0,
        num_q_heads,
        num_heads,
        head_dim,
        cos_sin_cache.shape[1] if cos_sin_cache is not None else 0,
        ROTATE=rotate,
        FP8=k_cache.dtype != k.dtype,
        DEPENDENT=dependent,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out


@triton.jit
def _rotate_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_cos_sin,
    num_q_heads,
    num_heads,
    head_dim,
    rotary_dim,
    DEPENDENT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, BLOCK)
    mask = (heads < num_heads)[:, None] & (cols < head_dim)[None, :]
    is_q = heads < num_q_heads
    k_heads = heads - num_q_heads
    q_sources = q_ptr + token * stride_qt + heads * stride_qh
    sources = tl.where(is_q, q_sources, k_ptr + token * stride_kt + k_heads * stride_kh)
    q_targets = q_out_ptr + (token * num_q_heads + heads) * head_dim
    num_k_heads = num_heads - num_q_heads
    k_targets = k_out_ptr + (token * num_k_heads + k_heads) * head_dim
    x = tl.load(sources[:, None] + cols[None, :], mask=mask, other=0.0)
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * stride_cos_sin
    rotated = _rotated(x, sources, angles, cols, mask, rotary_dim)
    x = tl.where((cols < rotary_dim)[None, :], rotated.to(x.dtype), x)
    tl.store(tl.where(is_q, q_targets, k_targets)[:, None] + cols[None, :], x, mask=mask)


def rotate_heads(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    tokens, num_q_heads, head_dim = q.shape
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if tokens == 0:
        return q_out, k_out
    dependent = has_dependent_launch(q)
    num_heads = num_q_heads + k.shape[1]
    _rotate_kernel[(tokens, triton.cdiv(num_heads, _HEADS))](
        q,
        k,
        positions,
        cos_sin_cache,
        q_out,
        k_out,
        *q.stride()[:2],
        *k.stride()[:2],
        cos_sin_cache.stride(0),
        num_q_heads,
        num_heads,
        head_dim,
        cos_sin_cache.shape[1],
        DEPENDENT=dependent,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )
    return q_out, k_out
