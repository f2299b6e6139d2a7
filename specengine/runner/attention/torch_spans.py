"""Attention request by request: for long or very uneven batches, and for a single request, whose
slots are often contiguous, so that K and V need no gather."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.interfaces import AttentionLayer
from specengine.core.platform import platform_of
from specengine.kernels.kv.fp8_rows import read_rows
from specengine.runner.attention.torch_dense import attend
from specengine.runner.attention.torch_masks import additive, visible_BQK


@dataclass
class Span:
    """One request: its rows of q, the slots of its whole sequence, and its mask."""

    begin: int  # rows of q: begin .. begin + num_queries - 1
    num_queries: int
    prefix_len: int  # tokens before the tree
    slots: Tensor  # int64 [prefix_len + num_past + num_queries]
    first_slot: int | None  # where the slots are first_slot, first_slot + 1, ...
    depths_Q: Tensor  # int64
    tree_mask_QN: Tensor | None
    num_past: int = 0
    masks: dict[tuple[int | None, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def keys(self, layer: AttentionLayer) -> slice:
        """The columns that any row of this request can see."""
        window, chunk, begin = layer.sliding_window, layer.attention_chunk, 0
        if window is not None:
            begin = max(0, self.prefix_len - window + 1)
        elif chunk is not None:
            begin = self.prefix_len - self.prefix_len % chunk
        return slice(begin, len(self.slots))

    def gather(self, cache: Tensor, keys: slice, dtype: torch.dtype) -> Tensor:
        """[1, num_kv_heads, K, head_dim]; a view where the slots are contiguous and of `dtype`."""
        if self.first_slot is not None:
            rows = cache[self.first_slot + keys.start : self.first_slot + keys.stop]
            rows = rows if rows.dtype is dtype else rows.to(dtype)
        else:
            rows = read_rows(cache, self.slots[keys], dtype)
        return rows.transpose(0, 1).unsqueeze(0)

    def mask(self, layer: AttentionLayer, keys: slice, dtype: torch.dtype) -> Tensor:
        """[1, 1, Q, K], the same for every layer of this window or chunk and dtype. PyTorch's fused
        attention for CPUs refuses a mask of three dimensions, and takes a fifth of the time."""
        key = layer.sliding_window, layer.attention_chunk, dtype
        if key not in self.masks:
            device = self.slots.device
            visible = visible_BQK(
                torch.tensor([self.prefix_len], device=device),
                torch.arange(keys.start, keys.stop, device=device),
                self.depths_Q[None],
                None if self.tree_mask_QN is None else self.tree_mask_QN[None],
                layer.sliding_window,
                self.num_past,
                layer.attention_chunk,
            )
            self.masks[key] = additive(visible, dtype).unsqueeze(1)
        return self.masks[key]

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, layer: AttentionLayer) -> Tensor:
        """q [Q, num_heads, head_dim], this request's rows -> [Q, num_heads, width of V]."""
        keys = self.keys(layer)
        k, v = self.gather(k_cache, keys, q.dtype), self.gather(v_cache, keys, q.dtype)
        if self.num_queries == 1 and not self.num_past:
            return _attend_one(q, k, v, layer)
        is_causal = self.prefix_len == 0 and self.tree_mask_QN is None
        reach = layer.sliding_window or layer.attention_chunk
        is_causal &= reach is None or reach >= self.num_queries
        mask = None if is_causal else self.mask(layer, keys, q.dtype)
        out = attend(q.transpose(0, 1).unsqueeze(0), k, v, layer, mask, is_causal)
        return out.squeeze(0).transpose(0, 1)


def _attend_one(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
    """One query that sees all of K: the query heads of a group are the rows of one matmul."""
    grouped = q.reshape(1, layer.num_kv_heads, -1, layer.head_dim)
    return attend(grouped, k, v, layer).reshape(*q.shape[:2], -1)


@dataclass
class SpanAttention:
    spans: list[Span]

    def forward(self, q: Tensor, layer: AttentionLayer, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        if len(self.spans) == 1:
            return self.spans[0].forward(q, k_cache, v_cache, layer)
        shape = (*q.shape[:2], v_cache.shape[2])
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
        for span in self.spans:
            rows = slice(span.begin, span.begin + span.num_queries)
            out[rows] = span.forward(q[rows], k_cache, v_cache, layer)
        return out


def plan_spans(batch: ForwardBatch) -> SpanAttention:
    table = batch.req_to_token_pool.req_to_token
    spans, begin = [], 0
    lens = zip(batch.prefix_lens_cpu, batch.extend_lens_cpu, strict=True)
    for request, (prefix, extend) in enumerate(lens):
        if extend:
            row = table[batch.req_pool_indices[request], : prefix + extend].to(torch.int64)
            spans.append(_span(batch, request, begin, row))
        begin += extend
    return SpanAttention(spans)


def _span(batch: ForwardBatch, request: int, begin: int, slots: Tensor) -> Span:
    extend = batch.extend_lens_cpu[request]
    tree_mask, num_past = None, 0
    if batch.tree is not None:
        tree_mask = batch.tree.mask_BNN[request, :extend].to(slots.device)
        num_past = batch.tree.num_past
    prefix = batch.prefix_lens_cpu[request] - num_past
    return Span(
        begin=begin,
        num_queries=extend,
        prefix_len=prefix,
        slots=slots,
        first_slot=_first_of_run(slots),
        depths_Q=batch.positions[begin : begin + extend] - prefix,
        tree_mask_QN=tree_mask,
        num_past=num_past,
    )


def _first_of_run(slots: Tensor) -> int | None:
    """The first of contiguous, ascending slots; None for others, and on a GPU, where the check
    would wait for the device."""
    if platform_of(slots.device).is_accelerator:
        return None
    steps = slots[1:] - slots[:-1]
    return int(slots[0]) if bool((steps == 1).all()) else None
