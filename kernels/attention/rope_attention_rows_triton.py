"""What the fused attention kernel does with rows of heads: rotates, fetches and absorbs them."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from specengine.kernels.attention.online_softmax_triton import capped, raise_max


@triton.jit
def rotated(
    head_ptrs,
    gain_ptr,
    eps,
    cols,
    cos,
    sin,
    mask,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads [R, D] rotated in float32 and rounded to their dtype (Su et al. 2021). HAS_NORM: each
    is normalised before, with the roundings of a norm by itself."""
    half: tl.constexpr = HEAD_DIM // 2
    partner = tl.where(cols < half, cols + half, cols - half)
    x = tl.load(head_ptrs[:, None] + cols[None, :], mask=mask, other=0.0)
    other = tl.load(head_ptrs[:, None] + partner[None, :], mask=mask, other=0.0)
    if HAS_NORM:
        in_head = cols < HEAD_DIM
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / HEAD_DIM + eps)[:, None]
        gain = tl.load(gain_ptr + cols, mask=in_head, other=0.0)[None, :]
        of_other = tl.load(gain_ptr + partner, mask=in_head, other=0.0)[None, :]
        normed = (wide * scale).to(gain.dtype) * gain
        other = ((other.to(tl.float32) * scale).to(gain.dtype) * of_other).to(x.dtype)
        x = normed.to(x.dtype)
    other = other.to(tl.float32)
    signed = tl.where((cols < half)[None, :], -other, other)
    return (x.to(tl.float32) * cos + signed * sin).to(x.dtype)


@triton.jit
def angles(cos_sin_ptr, positions, stride, cols, mask, HEAD_DIM: tl.constexpr):
    """cos and sin of each place of a head, float32 [R, D]."""
    half: tl.constexpr = HEAD_DIM // 2
    angle = tl.where(cols < half, cols, cols - half)
    places = cos_sin_ptr + positions[:, None] * stride + angle[None, :]
    return tl.load(places, mask=mask, other=0.0), tl.load(places + half, mask=mask, other=0.0)


@triton.jit
def whole_rows(is_row, in_head, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr):
    """Mask of whole rows, [ROWS, BLOCK_D]. WHOLE: no column is beyond the head."""
    if WHOLE:
        return tl.broadcast_to(is_row[:, None], (ROWS, BLOCK_D))
    return is_row[:, None] & in_head


@triton.jit
def fetch(
    table_ptr,
    cols,
    old,
    k_ptr,
    v_ptr,
    dims,
    in_head,
    stride,
    NARROW: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Keys and values of a block, [BLOCK_N, D] each. Half of the kernel's instructions were places
    and masks: one place serves both, in 32 bits where the cache allows."""
    slots = tl.load(table_ptr + cols, mask=old, other=0)
    slots = slots.to(tl.int32) if NARROW else slots.to(tl.int64)
    places = slots[:, None] * stride + dims[None, :]
    cells = whole_rows(old, in_head, places.shape[0], places.shape[1], WHOLE)
    k = tl.load(k_ptr + places, mask=cells, other=0.0)
    return k, tl.load(v_ptr + places, mask=cells, other=0.0)


@triton.jit
def absorb(
    q,
    k,
    v,
    visible,
    scale_log2,
    softcap_log2,
    row_max,
    total,
    acc,
    HAS_SOFTCAP: tl.constexpr,
):
    """One step of the online softmax over the keys of a block."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if HAS_SOFTCAP:
        scores = capped(scores, softcap_log2)
    scores = tl.where(visible, scores, float("-inf"))
    row_max, finite_max, decay = raise_max(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - finite_max[:, None])
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return row_max, total, acc
