"""Attention of ragged queries over keys and values that lie side by side, not in pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.kernels.attention.types import KeySpan

# Pairs of a query and a key for which there is a mask at once. It takes 4 bytes a pair while it is
# made into what PyTorch adds to scores, and this memory is in no plan.
_MOST_MASKED = 1 << 25


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Sequence[KeySpan], scale: float
) -> Tensor:
    """For each span, its queries are the last tokens of its keys, and see none that follow.

    q: [T, H, D]; k: [K, H, D]; v: [K, H, V] -> [T, H, V]; rows of q in no span are undefined.
    PyTorch's fused attention on any device, a call a span, or several where keys come before its
    queries: for few, long spans.
    """
    out = q.new_empty(*q.shape[:2], v.shape[2])
    for part in (part for span in spans for part in _parts(span)):
        rows = slice(part.first_row, part.first_row + part.num_rows)
        keys = slice(part.first_key, part.first_key + part.num_keys)
        seen = k[keys].transpose(0, 1)[None], v[keys].transpose(0, 1)[None]
        asked = q[rows].transpose(0, 1)[None]
        prefix = part.num_keys - part.num_rows
        mask = None
        if prefix:
            shape = part.num_rows, part.num_keys
            mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(prefix)
        found = F.scaled_dot_product_attention(
            asked, *seen, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        out[rows] = found[0].transpose(0, 1)
    return out


def _parts(span: KeySpan) -> Iterator[KeySpan]:
    """As many queries at once as there may be a mask for; all where they need none."""
    prefix = span.num_keys - span.num_rows
    most = max(_MOST_MASKED // span.num_keys, 1) if prefix else span.num_rows
    for start in range(0, span.num_rows, most):
        count = min(most, span.num_rows - start)
        yield KeySpan(span.first_row + start, count, span.first_key, prefix + start + count)
