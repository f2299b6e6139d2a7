"""Attention over dense keys and values in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specengine.core.interfaces import AttentionLayer


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: AttentionLayer,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """q [B, heads, Q, D], k [B, num_kv_heads, K, D], v [B, num_kv_heads, K, V] ->
    [B, heads, Q, V]. heads: a multiple of num_kv_heads. mask: added to the scores; is_causal: in
    its place, where Q = K."""
    is_grouped = q.shape[1] != k.shape[1]
    if layer.softcap is None and layer.sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=layer.scale, enable_gqa=is_grouped
        )
    if is_grouped:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if mask is not None:
        scores = scores + mask
    return torch.matmul(_softmax(scores, layer.sinks).to(v.dtype), v)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """[B, heads, Q, K]. sinks: of all query heads, which are heads or, grouped, heads x Q."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1)
    beside = beside.expand(*scores.shape[:3], 1)
    return torch.cat((scores, beside), -1).softmax(-1)[..., :-1]
