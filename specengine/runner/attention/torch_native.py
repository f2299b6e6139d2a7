"""Decode attention in C for short requests on a CPU, without a gather or a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.interfaces import AttentionLayer
from specengine.kernels.native import ops as native
from specengine.runner.attention.torch_padded import plan_padded

# The C kernel has one thread: with more keys in a batch, PyTorch's threads are faster.
_MAX_KEYS = 256


@dataclass
class NativeDecode:
    req_to_token: Tensor  # int32 [rows, context]
    rows: Tensor  # int64 [B]
    ends: Tensor  # int64 [B]
    scratch: Tensor  # float32
    batch: ForwardBatch  # for layers with sinks, which the C kernel does not compute

    def forward(self, q: Tensor, layer: AttentionLayer, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [B, num_heads, head_dim], one row a request -> the same shape."""
        if layer.sinks is not None:
            return plan_padded(self.batch).forward(q, layer, k_cache, v_cache)
        window, chunk = layer.sliding_window, layer.attention_chunk
        begins = torch.zeros_like(self.ends) if window is None else (self.ends - window).clamp(0)
        if chunk is not None:
            begins = self.ends - 1 - (self.ends - 1) % chunk
        return native.attend_decode(
            q.contiguous(),  # without a rotation it is cut from q, k and v side by side
            k_cache,
            v_cache,
            self.req_to_token,
            self.rows,
            begins,
            self.ends,
            self.scratch,
            layer.scale,
            layer.softcap,
        )


def fits(batch: ForwardBatch) -> bool:
    if not batch.forward_mode.is_decode() or sum(batch.prefix_lens_cpu) >= _MAX_KEYS:
        return False
    k_cache, v_cache = batch.token_to_kv_pool.get_kv_buffer(_first_layer(batch))
    return native.fits(k_cache[: batch.batch_size]) and v_cache.shape == k_cache.shape


def plan_native(batch: ForwardBatch) -> NativeDecode:
    k_cache, _ = batch.token_to_kv_pool.get_kv_buffer(_first_layer(batch))
    return NativeDecode(
        req_to_token=batch.req_to_token_pool.req_to_token,
        rows=batch.req_pool_indices,
        ends=batch.seq_lens,
        # Sized by the lengths that C reads: it writes one score a key.
        scratch=torch.empty(int(batch.seq_lens.max()) + 2 * k_cache.shape[2]),
        batch=batch,
    )


def _first_layer(batch: ForwardBatch) -> int:
    return batch.attn_layers[0].layer_id if batch.attn_layers else 0
