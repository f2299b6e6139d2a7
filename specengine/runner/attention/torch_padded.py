"""Attention of a whole batch in one call, every request padded to the longest: for few new tokens a
request (decode, verification)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.interfaces import AttentionLayer
from specengine.kernels.kv.fp8_rows import read_rows
from specengine.runner.attention.torch_dense import attend
from specengine.runner.attention.torch_masks import additive, visible_BQK


@dataclass
class PaddedAttention:
    slots: Tensor  # int64 [B * K]; padding repeats the request's first slot
    prefix_B: Tensor  # int64, tokens before the tree
    depths_BQ: Tensor  # int64
    tree_mask_BQN: Tensor | None
    num_past: int = 0
    rows_BQ: Tensor | None = None  # row of q of each padded query; None where nothing is ragged
    real: Tensor | None = None  # int64 [T], the padded queries that are rows of q
    masks: dict[tuple[int | None, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def gather(self, cache: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, num_kv_heads, K, head_dim]"""
        rows = read_rows(cache, self.slots, dtype)
        return rows.view(len(self.prefix_B), -1, *cache.shape[1:]).transpose(1, 2)

    def mask(self, layer: AttentionLayer, dtype: torch.dtype) -> Tensor:
        """[B, 1, Q, K], the same for every layer of this window or chunk and dtype."""
        key = layer.sliding_window, layer.attention_chunk, dtype
        if key not in self.masks:
            num_keys = len(self.slots) // len(self.prefix_B)
            visible = visible_BQK(
                self.prefix_B,
                torch.arange(num_keys, device=self.slots.device),
                self.depths_BQ,
                self.tree_mask_BQN,
                layer.sliding_window,
                self.num_past,
                layer.attention_chunk,
            )
            self.masks[key] = additive(visible, dtype).unsqueeze(1)
        return self.masks[key]

    def forward(self, q: Tensor, layer: AttentionLayer, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        k, v = self.gather(k_cache, q.dtype), self.gather(v_cache, q.dtype)
        mask = self.mask(layer, q.dtype)
        batch_size, num_queries = self.depths_BQ.shape
        if num_queries == 1:
            grouped = q.reshape(batch_size, layer.num_kv_heads, -1, layer.head_dim)
            return attend(grouped, k, v, layer, mask).reshape(*q.shape[:2], -1)
        padded = q if self.rows_BQ is None else q[self.rows_BQ]
        padded = padded.reshape(batch_size, num_queries, *q.shape[1:]).transpose(1, 2)
        out = attend(padded, k, v, layer, mask)
        flat = out.transpose(1, 2).reshape(-1, q.shape[1], out.shape[-1])
        return flat if self.real is None else flat.index_select(0, self.real)


def plan_padded(batch: ForwardBatch) -> PaddedAttention:
    device = batch.req_pool_indices.device
    num_queries, num_keys = batch.max_extend_len, batch.max_seq_len
    table = batch.req_to_token_pool.req_to_token[batch.req_pool_indices, :num_keys]
    is_real = torch.arange(num_keys, device=device) < batch.seq_lens[:, None]
    slots = torch.where(is_real, table, table[:, :1])
    order = torch.arange(num_queries, device=device)
    rows_BQ = batch.qo_indptr[:-1, None] + torch.minimum(order, batch.extend_lens[:, None] - 1)
    tree_mask, num_past = None, 0
    if batch.tree is not None:
        tree_mask, num_past = batch.tree.mask_BNN[:, :num_queries].to(device), batch.tree.num_past
    prefix_B = batch.prefix_lens - num_past
    attention = PaddedAttention(
        slots=slots.reshape(-1).to(torch.int64),
        prefix_B=prefix_B,
        depths_BQ=batch.positions[rows_BQ] - prefix_B[:, None],
        tree_mask_BQN=tree_mask,
        num_past=num_past,
    )
    if min(batch.extend_lens_cpu) != num_queries:
        attention.rows_BQ = rows_BQ
        attention.real = (order < batch.extend_lens[:, None]).view(-1).nonzero().view(-1)
    return attention
