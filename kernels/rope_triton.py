"""Rotary embedding and KV write in Triton: a program takes one head of one token."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch


@triton.jit
def _rotated(head_ptr, cos_sin_ptr, cols, rotary_dim):
    """One head with its first rotary_dim values rotated, in float32. cols: [BLOCK] places."""
    half = rotary_dim // 2
    is_rotary = cols < rotary_dim
    is_first = cols < half
    partner = tl.where(is_first, cols + half, cols - half)
    angle = tl.where(is_first, cols, cols - half)
    x = tl.load(head_ptr + cols, mask=is_rotary, other=0.0).to(tl.float32)
    other = tl.load(head_ptr + partner, mask=is_rotary, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin_ptr + angle, mask=is_rotary, other=0.0)
    sin = tl.load(cos_sin_ptr + half + angle, mask=is_rotary, other=0.0)
    return x * cos + tl.where(is_first, -other, other) * sin


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
    head_dim,
    rotary_dim,
    ROTATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < head_dim
    is_q = head < num_q_heads
    kv_head = head - num_q_heads
    slot = tl.load(loc_ptr + token)
    source = k_ptr + token * stride_kt + kv_head * stride_kh
    target = k_cache_ptr + slot * stride_ks + kv_head * stride_kc
    if is_q:
        source = q_ptr + token * stride_qt + head * stride_qh
        target = out_ptr + (token * num_q_heads + head) * head_dim
    x = tl.load(source + cols, mask=mask, other=0.0)
    if ROTATE:
        position = tl.load(positions_ptr + token)
        rotated = _rotated(source, cos_sin_ptr + position * stride_cos_sin, cols, rotary_dim)
        x = tl.where(cols < rotary_dim, rotated.to(x.dtype), x)
    tl.store(target + cols, x, mask=mask)
    if not is_q:
        v = tl.load(v_ptr + token * stride_vt + kv_head * stride_vh + cols, mask=mask, other=0.0)
        tl.store(v_cache_ptr + slot * stride_vs + kv_head * stride_vc + cols, v, mask=mask)


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
    _rope_store_kernel[(tokens, num_q_heads + k.shape[1])](
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
        head_dim,
        cos_sin_cache.shape[1] if cos_sin_cache is not None else 0,
        ROTATE=rotate,
        DEPENDENT=dependent,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out
