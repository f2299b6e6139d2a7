"""Attention of ragged queries over keys and values that lie side by side, not in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.kernels.attention.types import KeySpan


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Sequence[KeySpan], scale: float
) -> Tensor:
    """For each span, its queries are the last tokens of its keys, and see none that follow.

    q: [T, H, D]; k: [K, H, D]; v: [K, H, V] -> [T, H, V]; rows of q in no span are undefined.
    PyTorch's fused attention on any device, a call a span: for few, long spans.
    """
    out = q.new_empty(*q.shape[:2], v.shape[2])
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        keys = slice(span.first_key, span.first_key + span.num_keys)
        seen = k[keys].transpose(0, 1)[None], v[keys].transpose(0, 1)[None]
        asked = q[rows].transpose(0, 1)[None]
        prefix = span.num_keys - span.num_rows
        mask = None
        if prefix:
            shape = span.num_rows, span.num_keys
            mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(prefix)
        found = F.scaled_dot_product_attention(
            asked, *seen, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        out[rows] = found[0].transpose(0, 1)
    return out
