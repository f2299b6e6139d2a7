"""Whether a forward expands keys and values of latent attention (layers/latent_attention.py)."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.interfaces import AttentionLayer
from specengine.kernels.attention.types import Expansion, KeySpan

# Of expanded keys and values at once. Longer contexts stay absorbed: this memory is in no plan.
_MOST_BYTES = 512 << 20


def plan_expansion(batch: ForwardBatch) -> Expansion | None:
    """What to expand; None where the absorbed form costs less, and in all but prefills. Not for
    graphs, whose lengths the host does not know. Layers of one model are alike."""
    layer = next((one for one in batch.attn_layers if one.expanded is not None), None)
    if layer is None or batch.tree is not None or batch.first_keys is not None:
        return None
    # Of other modes the host's lengths may be bounds.
    if not batch.forward_mode.is_prefill() or not _pays(batch, layer):
        return None
    prefix, extend = batch.prefix_lens_cpu, batch.extend_lens_cpu
    keys = [p + e for p, e in zip(prefix, extend, strict=True)]
    starts = accumulate(keys, initial=0)
    rows = accumulate(extend, initial=0)
    spans = tuple(
        KeySpan(row, count, start, total)
        for row, count, start, total in zip(rows, extend, starts, keys, strict=False)
        if count
    )
    return Expansion(_slots(batch, sum(keys)), spans)


def _pays(batch: ForwardBatch, layer: AttentionLayer) -> bool:
    """By multiplications of a head: those of each pair of query and key, and those of each key that
    is expanded."""
    heads, rank = layer.expanded, layer.value_dim
    assert heads is not None
    assert rank is not None
    pairs = keys = 0
    for prefix, extend in zip(batch.prefix_lens_cpu, batch.extend_lens_cpu, strict=True):
        pairs += extend * (2 * prefix + extend) // 2
        keys += prefix + extend
    num_bytes = keys * layer.num_heads * 2 * (heads.key_dim + heads.value_dim) * 2
    absorbed = pairs * (layer.head_dim + rank)
    rope_dim = layer.head_dim - rank
    each_key = rank * (heads.key_dim - rope_dim + heads.value_dim)
    expanded = pairs * (heads.key_dim + heads.value_dim) + keys * each_key
    return expanded < absorbed and num_bytes <= _MOST_BYTES


def _slots(batch: ForwardBatch, count: int) -> Tensor:
    """int64 [count]: of every request its tokens in order."""
    device = batch.seq_lens.device
    order = torch.arange(len(batch.seq_lens), device=device)
    request_K = torch.repeat_interleave(order, batch.seq_lens, output_size=count)
    starts_B = batch.seq_lens.cumsum(0) - batch.seq_lens
    place_K = torch.arange(count, device=device) - starts_B[request_K]
    table = batch.req_to_token_pool.req_to_token
    return table[batch.req_pool_indices[request_K], place_K].long()
