"""Checks at start that an attention backend can serve a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.core.batch import AttentionBackend
from specengine.core.errors import ConfigError
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import AttentionLayer


def check_layers(
    backend: AttentionBackend, layers: Sequence[AttentionLayer], dtype: torch.dtype
) -> None:
    """Raises ConfigError where the backend lacks a layer's head size, or the KV's dtype."""
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
        _check_layers(backend.for_mode(mode), layers, dtype)


def _check_layers(
    backend: AttentionBackend, layers: Sequence[AttentionLayer], dtype: torch.dtype
) -> None:
    limits = backend.limits
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float8_e4m3fn:
        if not limits.fp8_kv:
            raise _refused(backend, "reads no KV in FP8; leave out --kv-cache-dtype fp8")
    elif limits.dtypes is not None and layers and dtype not in limits.dtypes:
        raise _refused(backend, f"does not compute in {name}; use --dtype bfloat16")
    for layer in layers:
        if limits.head_dims is not None and layer.head_dim not in limits.head_dims:
            raise _refused(backend, f"has no kernels for heads of {layer.head_dim}")
        if layer.softcap is not None and not limits.softcap:
            raise _refused(backend, "does not cap attention scores (attention_softcap)")
        if layer.sinks is not None and not limits.sinks:
            raise _refused(backend, "has no attention sinks")
        if layer.value_dim is not None and not limits.shared_kv:
            raise _refused(backend, "does not read latent attention, whose V is a part of K")
        if layer.attention_chunk is not None and not limits.chunks:
            raise _refused(backend, "does not attend within chunks (attention_chunk)")
    if limits.layers_alike and len({_shape(layer) for layer in layers}) > 1:
        raise _refused(
            backend, "wants every layer to have the same heads, scale, window and softcap"
        )


def check_graphs(backend: AttentionBackend) -> None:
    """Raises ConfigError where forwards of the backend cannot be captured."""
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
        if not backend.for_mode(mode).limits.graphs:
            raise _refused(
                backend.for_mode(mode), "runs in no CUDA graph; give --disable-cuda-graph"
            )


def check_trees(backend: AttentionBackend, layers: Sequence[AttentionLayer]) -> None:
    """Raises ConfigError where the backend cannot verify draft trees with these layers."""
    backend = backend.for_mode(ForwardMode.TARGET_VERIFY)
    if not backend.limits.windows_under_trees and any(layer.sliding_window for layer in layers):
        raise _refused(backend, "has no sliding window under draft trees; draft chains")


def _shape(layer: AttentionLayer) -> tuple[float | None, ...]:
    heads = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
    return *heads, layer.scale, layer.sliding_window, layer.attention_chunk, layer.softcap


def _refused(backend: AttentionBackend, why: str) -> ConfigError:
    return ConfigError(
        f"the attention backend {backend.name} {why}, or use --attention-backend triton"
    )
