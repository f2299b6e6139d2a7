"""Rotary embedding and KV write in plain PyTorch, with as few operator calls as possible: a small
model's decode on CPU pays several microseconds for each."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.kv.fp8_rows import write_rows


def rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Rotate the first rotary_dim values of every head of x [T, heads, D]."""
    tokens, heads, head_dim = x.shape
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim < head_dim:
        rotated = rotate(x[..., :rotary_dim], positions, cos_sin_cache)
        return torch.cat((rotated, x[..., rotary_dim:]), -1)
    half = rotary_dim // 2
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    out = x.reshape(tokens, heads, 2, half) * cos.unsqueeze(2)
    first, second = x.chunk(2, -1)
    out_first, out_second = out.unbind(2)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return out.view(tokens, heads, head_dim).to(x.dtype)


def rotate_heads(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    return rotate(q, positions, cos_sin_cache), rotate(k, positions, cos_sin_cache)


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
    if cos_sin_cache is not None:
        both = rotate(torch.cat((q, k), 1), positions, cos_sin_cache)
        num_q_heads = q.shape[1]
        q, k = both[:, :num_q_heads], both[:, num_q_heads:]
    write_rows(k_cache, loc, k)
    write_rows(v_cache, loc, v)
    return q
