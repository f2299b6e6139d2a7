"""All decoder layers of a small model for few rows, as one operation.

A small model is bound by the number of its kernels: five a layer, each of which waits for the one
ahead. Here blocks stay, and pass values to each other through L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels import decoder_stack_ref
from specengine.kernels.cuda import program
from specengine.kernels.dispatch import (
    Backend,
    has_dependent_launch,
    has_much_shared,
    has_whole_device,
    multiprocessors,
)
from specengine.kernels.paged_attention import PagedBatch

MAX_ROWS = 16


@dataclass(frozen=True)
class StackShape:
    """Sizes of every layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    num_layers: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class LayerWeights:
    """Of one layer: H hidden, A of the heads together, Q of the projections, I intermediate."""

    input_gain: Tensor  # [H]
    qkv: Tensor  # [Q, H]
    out: Tensor  # [H, A]
    gain: Tensor  # [H]
    gate_up: Tensor  # [2 I, H], gate rows before up rows
    down: Tensor  # [H, I]


@dataclass(frozen=True)
class StackWeights:
    """All that a forward does not change. cos_sin: float32 [C, head_dim], as RotaryEmbedding."""

    shape: StackShape
    layers: Sequence[LayerWeights]
    cos_sin: Tensor
    eps: float
    scale: float


@dataclass(frozen=True)
class StackKV:
    """Where a forward's KV goes. k, v: [S, kv_heads, head_dim] of each layer; loc: int64 [T]."""

    k: Sequence[Tensor]
    v: Sequence[Tensor]
    loc: Tensor


@dataclass(frozen=True)
class StackOutput:
    """stream: [T, H] behind the last layer; captured: likewise, behind each captured layer."""

    stream: Tensor
    captured: list[Tensor]


def fits(x: Tensor, shape: StackShape, batch: PagedBatch) -> bool:
    """Whether the kernel can take x [T, H] and the batch, and is the faster choice."""
    rows = x.shape[0]
    if not 0 < rows <= MAX_ROWS or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not has_dependent_launch(x) or not program.available() or not has_whole_device():
        return False
    if batch.num_past or not has_much_shared(x):
        return False
    from specengine.kernels import decoder_stack_cuda

    blocks = multiprocessors(x.device)
    is_aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    has_blocks = most_tasks(rows, shape, batch) <= blocks
    return is_aligned and has_blocks and decoder_stack_cuda.has_room(shape, blocks)


def most_tasks(rows: int, shape: StackShape, batch: PagedBatch) -> int:
    """Parts of attention that blocks have to be there for: 16 rows of a KV head of a request."""
    group = shape.heads // shape.kv_heads
    tiles = len(batch.seq_lens) * -(-batch.max_queries * group // 16)
    return min(tiles, rows * group) * shape.kv_heads


def decoder_stack(
    x: Tensor,
    weights: StackWeights,
    kv: StackKV,
    batch: PagedBatch,
    capture_layers: Sequence[int] = (),
    *,
    backend: Backend = "auto",
) -> StackOutput:
    """x: [T, H], the residual stream before the first layer, not modified.

    For each layer: qkv = norm(x) qkv^T; heads = rope_attention(qkv), which writes K and V at loc;
    x = x + heads out^T; x = x + (silu(g) * u) down^T with g, u = norm(x) gate_up^T. Rounded where
    the single operations round. "cuda" takes half precision, T up to MAX_ROWS, heads of 64, and
    a batch whose most_tasks have a block each; ValueError otherwise. Rows of x that belong to no
    request are undefined. Two launches on one device must not overlap.
    """
    if backend == "cuda" or (backend == "auto" and fits(x, weights.shape, batch)):
        from specengine.kernels import decoder_stack_cuda

        return decoder_stack_cuda.decoder_stack(x, weights, kv, batch, capture_layers)
    return decoder_stack_ref.decoder_stack(x, weights, kv, batch, capture_layers)
