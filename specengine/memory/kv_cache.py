"""The KV memory itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specengine.kernels.kv.kv_move import kv_move
from specengine.kernels.kv.types import KVBuffers, KVPaths


@dataclass(frozen=True)
class KVShape:
    """What one token leaves behind in every layer of attention. runner.memory.kv_shape asks the
    layers for it.

    value_dim: V is the first value_dim numbers of K, and takes no memory of its own (latent
    attention); None: it is kept beside K, and as wide. layer_ids: those that keep anything,
    ascending; None is all.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    value_dim: int | None = None
    layer_ids: tuple[int, ...] | None = None

    @property
    def kept_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_layers)) if self.layer_ids is None else self.layer_ids

    @property
    def bytes_per_token(self) -> int:
        """K and V, all layers."""
        numbers = self.num_kv_heads * self.head_dim * (2 if self.value_dim is None else 1)
        return len(self.kept_layers) * numbers * self.dtype.itemsize


class MHATokenToKVPool:
    """K and V of attention: one tensor each a layer, [S, num_kv_heads, head_dim], or K alone, of
    which V is a part. Not one stacked tensor: compiled graphs that mutate one run far slower on
    CPU.

    num_slots: S, the reserved first page included. Starts as zeros: attention may multiply slots
    that it masks by zero, and a NaN would survive that.
    """

    def __init__(self, num_slots: int, shape: KVShape, device: torch.device) -> None:
        self.shape = shape
        self.num_slots = num_slots
        size = (num_slots, shape.num_kv_heads, shape.head_dim)
        layers, width = shape.kept_layers, shape.value_dim
        self._k = {layer: _zeros(size, shape.dtype, device) for layer in layers}
        kept = [*self._k.values()]
        if width is None:
            self._v = {layer: _zeros(size, shape.dtype, device) for layer in layers}
            kept += self._v.values()
        else:
            self._v = {layer: k[..., :width] for layer, k in self._k.items()}
        # Moving does not look at values, and PyTorch moves no FP8.
        is_fp8 = shape.dtype.itemsize == 1
        self._buffers = KVBuffers.of([one.view(torch.uint8) if is_fp8 else one for one in kept])

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, [S, num_kv_heads, head_dim] and [S, num_kv_heads, head_dim or
        value_dim]."""
        return self._k[layer_id], self._v[layer_id]

    def tensors(self) -> list[Tensor]:
        """All of K and V."""
        return [*self._k.values(), *self._v.values()]

    def keep_paths(self, paths: KVPaths) -> None:
        """Move the KV of the accepted path of each tree, in every layer, to where a chain would
        have written it."""
        kv_move(self._buffers, paths)


def _zeros(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On CPU the pages come from calloc, which torch.zeros would touch one by one: gigabytes that
    no request may ever use."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(size)
