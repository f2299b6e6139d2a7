"""All decoder layers of a small model for few rows, as one operation.

A small model is bound by the number of its kernels: five a layer, each of which waits for the one
ahead. Here blocks stay, and pass values to each other through L2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.cuda import program
from specengine.kernels.dispatch import (
    Backend,
    has_dependent_launch,
    has_much_shared,
    has_whole_device,
    multiprocessors,
)
from specengine.kernels.linear import decoder_stack_ref
from specengine.kernels.linear.types import (
    MOST_STACK_ROWS,
    StackKV,
    StackOutput,
    StackShape,
    StackWeights,
    most_tasks,
)


def fits(x: Tensor, shape: StackShape, batch: PagedBatch) -> bool:
    """Whether the kernel can take x [T, H] and the batch, and is the faster choice."""
    rows = x.shape[0]
    if not 0 < rows <= MOST_STACK_ROWS or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not has_dependent_launch(x) or not program.available() or not has_whole_device():
        return False
    if batch.num_past or not has_much_shared(x):
        return False
    from specengine.kernels.linear import decoder_stack_cuda

    blocks = multiprocessors(x.device)
    is_aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    has_blocks = most_tasks(rows, shape, batch) <= blocks
    return is_aligned and has_blocks and decoder_stack_cuda.has_room(shape, blocks)


def decoder_stack(
    x: Tensor,
    weights: StackWeights,
    kv: StackKV,
    batch: PagedBatch,
    feature_layers: Sequence[int] = (),
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
        from specengine.kernels.linear import decoder_stack_cuda

        return decoder_stack_cuda.decoder_stack(x, weights, kv, batch, feature_layers)
    return decoder_stack_ref.decoder_stack(x, weights, kv, batch, feature_layers)
