"""What the gated delta rule reads of verified nodes, in Triton: behind the convolution over each
node's path, as queries and keys of length 1, values, writes and decays.

A program a node and a head of keys, of queries or of values: all at once, so that the walk along
the nodes (delta_rule_triton.py) has none of it to wait for.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.delta.delta_rule_ref import NORM_EPS
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    NodeBatch,
    NodeUpdates,
)
from specengine.kernels.sizes import power_of_2


@triton.jit
def weighted(x, weights_ptr, channels, is_real, tap, WIDTH: tl.constexpr):
    """One input of the convolution, weighted."""
    weight = tl.load(weights_ptr + channels * WIDTH + tap, mask=is_real, other=0.0)
    return x.to(tl.float32) * weight.to(tl.float32)


@triton.jit
def silu(x, dtype: tl.constexpr):
    return (x * tl.sigmoid(x)).to(dtype).to(tl.float32)


@triton.jit
def of_length_1(x, EPS: tl.constexpr):
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) + EPS))


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def share_written(asked_ptr, dtype):
    """Of a token and a head: how much of what is new the memory takes."""
    return tl.sigmoid(tl.load(asked_ptr).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def log_of_decay(time_ptr, decay_log_ptr, time_bias_ptr):
    """Of a token and a head: the logarithm of what is left of the memory before it."""
    rate = tl.exp(tl.load(decay_log_ptr).to(tl.float32))
    time = tl.load(time_ptr).to(tl.float32)
    return -rate * softplus(time + tl.load(time_bias_ptr).to(tl.float32))


@triton.jit
def _nodes_kernel(
    mixed_ptr,
    write_ptr,
    decay_ptr,
    conv_ptr,
    decay_log_ptr,
    time_bias_ptr,
    state_inputs_ptr,
    inputs_ptr,
    keys_ptr,
    decays_ptr,
    q_ptr,
    v_ptr,
    writes_ptr,
    steps_ptr,
    rows_ptr,
    starts_ptr,
    mask_ptr,
    stride_mixed,
    stride_write,
    stride_decay,
    stride_mask_b,
    stride_mask_n,
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_TREE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    C: tl.constexpr = 2 * G * K + M * E
    HELD: tl.constexpr = WIDTH - 1
    request, part, node = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + request)
    if node >= tl.load(starts_ptr + request + 1) - start:
        return
    row = tl.load(rows_ptr + request).to(tl.int64)
    # Parts are the heads of q, of k and of v, in the order of the channels.
    of_keys = part < 2 * G
    size = tl.where(of_keys, K, E)
    order = tl.arange(0, BLOCK)
    is_real = order < size
    channels = tl.where(of_keys, part * K, 2 * G * K + (part - 2 * G) * E) + order
    dtype = mixed_ptr.dtype.element_ty

    n_order = tl.arange(0, BLOCK_N)
    seen = n_order < node
    if HAS_TREE:
        mask_row = mask_ptr + request * stride_mask_b + node * stride_mask_n
        seen = seen & (tl.load(mask_row + n_order, mask=seen, other=0) != 0)
    depth = tl.sum(seen.to(tl.int32), 0)
    # Slot 0 is of padding, and read as zeros.
    held = tl.where(row != 0, HELD, 0)
    text_ptr = state_inputs_ptr + row * HELD * C
    at = start + node
    raw = tl.load(mixed_ptr + at * stride_mixed + channels, mask=is_real, other=0.0)
    x = weighted(raw, conv_ptr, channels, is_real, HELD, WIDTH)
    ancestor = node
    for back in tl.static_range(1, WIDTH):
        ancestor = tl.max(tl.where(seen & (n_order < ancestor), n_order, -1), 0)
        # Inputs of the tree as far as it is deep, then those of the text before it.
        near = order < tl.where(depth >= back, size, 0)
        far = order < tl.where(depth < tl.minimum(back, held), size, 0)
        x_ptr = mixed_ptr + (start + tl.maximum(ancestor, 0)) * stride_mixed
        t_ptr = text_ptr + tl.minimum(HELD - back + depth, HELD - 1) * C
        given = tl.load(x_ptr + channels, mask=near, other=0.0)
        given += tl.load(t_ptr + channels, mask=far, other=0.0)
        x += weighted(given, conv_ptr, channels, is_real, HELD - back, WIDTH)
    x = silu(x, dtype)
    tl.store(inputs_ptr + at * C + channels, raw, mask=is_real)
    if of_keys:
        x = of_length_1(x, EPS)
        if part < G:
            tl.store(q_ptr + (at * G + part) * K + order, x * SCALE, mask=is_real)
        else:
            tl.store(keys_ptr + (at * G + part - G) * K + order, x, mask=is_real)
    else:
        head = part - 2 * G
        tl.store(v_ptr + (at * M + head) * E + order, x, mask=is_real)
        tl.store(
            writes_ptr + at * M + head, share_written(write_ptr + at * stride_write + head, dtype)
        )
        time_ptr = decay_ptr + at * stride_decay + head
        step = log_of_decay(time_ptr, decay_log_ptr + head, time_bias_ptr + head)
        tl.store(steps_ptr + at * M + head, step)
        tl.store(decays_ptr + at * M + head, tl.exp(step))


@dataclass(frozen=True)
class NodeTokens:
    """float32, a row a node. Keys are among the updates."""

    q: Tensor  # [N, G, K], scaled
    v: Tensor  # [N, M, E]
    writes: Tensor  # [N, M]
    steps: Tensor  # [N, M], log of the decay


def node_tokens(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    updates: NodeUpdates,
    nodes: NodeBatch,
    shape: DeltaShape,
) -> NodeTokens:
    """Also writes the updates' inputs, keys and decays."""
    mixed, mask = given.mixed_TC, nodes.mask_BNN
    count, groups, heads = len(mixed), shape.num_key_heads, shape.num_heads
    made = NodeTokens(
        *(
            torch.empty(count, *size, dtype=torch.float32, device=mixed.device)
            for size in ((groups, shape.key_dim), (heads, shape.value_dim), (heads,), (heads,))
        )
    )
    strides = (0, 0) if mask is None else (mask.stride(0), mask.stride(1))
    _nodes_kernel[len(nodes.rows_B), 2 * groups + heads, nodes.width](
        mixed,
        given.write_TM,
        given.decay_TM,
        weights.conv_CW,
        weights.decay_log_M,
        weights.time_bias_M,
        state.inputs,
        updates.inputs,
        updates.keys,
        updates.decays,
        made.q,
        made.v,
        made.writes,
        made.steps,
        nodes.rows_B,
        nodes.starts,
        nodes.rows_B if mask is None else mask,
        mixed.stride(0),
        given.write_TM.stride(0),
        given.decay_TM.stride(0),
        *strides,
        G=groups,
        M=heads,
        K=shape.key_dim,
        E=shape.value_dim,
        WIDTH=shape.conv_width,
        EPS=NORM_EPS,
        SCALE=shape.key_dim**-0.5,
        HAS_TREE=mask is not None,
        BLOCK_N=max(2, power_of_2(nodes.width)),
        BLOCK=power_of_2(max(shape.key_dim, shape.value_dim)),
        num_warps=1,
    )
    return made
