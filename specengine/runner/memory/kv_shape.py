"""What tokens of models leave in the KV memory, as their attention layers declare it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.layers.attention import attention_layers
from specengine.memory.kv_cache import KVShape


def kv_shape_of(models: Sequence[object], dtype: torch.dtype) -> KVShape:
    """The KV shape of models that share a pool, each with layers of its own there: this rank's
    heads alone. Raises ValueError where layers keep KV of several forms, which one pool does not
    hold."""
    layers = [layer for model in models for layer in attention_layers(model)]
    if not layers:
        return KVShape(0, 1, 1, dtype)
    forms = {(one.num_kv_heads, one.head_dim, one.value_dim) for one in layers}
    if len(forms) != 1:
        raise ValueError(f"one pool holds one form of KV, and the layers have {sorted(forms)}")
    [(num_kv_heads, head_dim, value_dim)] = forms
    kept = tuple(sorted({one.layer_id for one in layers}))
    count = kept[-1] + 1
    is_all = len(kept) == count
    return KVShape(count, num_kv_heads, head_dim, dtype, value_dim, None if is_all else kept)
