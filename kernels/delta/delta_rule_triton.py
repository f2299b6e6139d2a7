"""The gated delta rule at verified nodes in Triton, and what moves states on by accepted paths.

What nodes read is already there (delta_nodes_triton.py). A program of `verify` takes a request, a
head and some columns of its memory, which it reads once. It goes through the nodes in their order,
and needs no state of theirs: with S the memory before the tree and D[i, j] the decay between a node
and one that it sees,

    S_i^T x = D[i, root's parent] * S^T x + sum over seen j of D[i, j] * (k_j . x) * delta_j

so that the keys and deltas of the nodes so far are enough.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.delta.delta_nodes_triton import node_tokens
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    NodeBatch,
    NodeUpdates,
    StatePaths,
)
from specengine.kernels.sizes import cdiv, power_of_2

COLUMNS = 32  # of a head's memory, in one program
CHANNELS = 512  # of the convolution's inputs, in one program


@triton.jit
def _verify_kernel(
    q_ptr,
    keys_ptr,
    v_ptr,
    writes_ptr,
    steps_ptr,
    memory_ptr,
    deltas_ptr,
    out_ptr,
    rows_ptr,
    starts_ptr,
    mask_ptr,
    stride_mask_b,
    stride_mask_n,
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    HAS_TREE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    # Programs that run beside each other read neighbouring memory.
    head, block, request = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    group = head // (M // G)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    k_order, e_order = tl.arange(0, BLOCK_K), block * BLOCK_E + tl.arange(0, BLOCK_E)
    k_real, e_real = k_order < K, e_order < E
    n_order = tl.arange(0, BLOCK_N)

    # Slot 0 is of padding, and read as zeros.
    places = ((row * M + head) * K + k_order[:, None]) * E + e_order[None, :]
    in_memory = (k_order < tl.where(row != 0, K, 0))[:, None] & e_real[None, :]
    memory = tl.load(memory_ptr + places, mask=in_memory, other=0.0)
    keys = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    deltas = tl.zeros([BLOCK_N, BLOCK_E], dtype=tl.float32)
    kept = tl.zeros([BLOCK_N], dtype=tl.float32)  # log of the decay since the tree began
    for node in range(count):
        at = start + node
        q = tl.load(q_ptr + (at * G + group) * K + k_order, mask=k_real, other=0.0)
        k = tl.load(keys_ptr + (at * G + group) * K + k_order, mask=k_real, other=0.0)
        v = tl.load(v_ptr + (at * M + head) * E + e_order, mask=e_real, other=0.0)
        write = tl.load(writes_ptr + at * M + head)
        step = tl.load(steps_ptr + at * M + head)
        seen = n_order < node
        if HAS_TREE:
            mask_row = mask_ptr + request * stride_mask_b + node * stride_mask_n
            seen = seen & (tl.load(mask_row + n_order, mask=seen, other=0) != 0)
        parent = tl.max(tl.where(seen, n_order, -1), 0)
        since = step + tl.sum(tl.where(n_order == parent, kept, 0.0), 0)
        between = tl.where(seen, tl.exp(since - tl.where(seen, kept, since)), 0.0)
        whole = tl.exp(since)
        near = between * tl.sum(keys * k[None, :], 1)
        read = whole * tl.sum(memory * k[:, None], 0) + tl.sum(near[:, None] * deltas, 0)
        delta = write * (v - read)
        near = between * tl.sum(keys * q[None, :], 1)
        out = whole * tl.sum(memory * q[:, None], 0) + tl.sum(near[:, None] * deltas, 0)
        out += tl.sum(q * k, 0) * delta
        tl.store(out_ptr + (at * M + head) * E + e_order, out, mask=e_real)
        tl.store(deltas_ptr + (at * M + head) * E + e_order, delta, mask=e_real)
        keys = tl.where(n_order[:, None] == node, k[None, :], keys)
        deltas = tl.where(n_order[:, None] == node, delta[None, :], deltas)
        kept = tl.where(n_order == node, since, kept)


@triton.jit
def _keep_memory_kernel(
    memory_ptr,
    keys_ptr,
    deltas_ptr,
    decays_ptr,
    rows_ptr,
    starts_ptr,
    accepted_ptr,
    nodes_ptr,
    layer_memory,
    layer_keys,
    layer_deltas,
    layer_decays,
    width,
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    head, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    request, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(starts_ptr + request)
    stand = tl.where(row != 0, tl.load(accepted_ptr + request) + 1, 0)
    k_order, e_order = tl.arange(0, BLOCK_K), block * BLOCK_E + tl.arange(0, BLOCK_E)
    k_real, e_real = k_order < K, e_order < E
    in_memory = (k_order < tl.where(stand > 0, K, 0))[:, None] & e_real[None, :]
    places = ((row * M + head) * K + k_order[:, None]) * E + e_order[None, :]
    memory_ptr += layer * layer_memory + places
    memory = tl.load(memory_ptr, mask=in_memory, other=0.0)
    for place in range(stand):
        node = start + place
        if HAS_PATHS:
            node = start + tl.load(nodes_ptr + request * width + place)
        key_ptr = keys_ptr + layer * layer_keys + (node * G + head // (M // G)) * K
        k = tl.load(key_ptr + k_order, mask=k_real, other=0.0)
        delta_ptr = deltas_ptr + layer * layer_deltas + (node * M + head) * E
        delta = tl.load(delta_ptr + e_order, mask=e_real, other=0.0)
        decay = tl.load(decays_ptr + layer * layer_decays + node * M + head)
        memory = memory * decay + k[:, None] * delta[None, :]
    tl.store(memory_ptr, memory, mask=in_memory)


@triton.jit
def _keep_inputs_kernel(
    state_ptr,
    inputs_ptr,
    rows_ptr,
    starts_ptr,
    accepted_ptr,
    nodes_ptr,
    layer_state,
    layer_inputs,
    width,
    C: tl.constexpr,
    HELD: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    request, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(starts_ptr + request)
    stand = tl.load(accepted_ptr + request) + 1
    order = tl.arange(0, BLOCK_H)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (order < tl.where(row != 0, HELD, 0))[:, None] & (channels < C)[None, :]
    place = order + stand  # in the line of what was held and what the path adds
    from_path = place >= HELD
    node = tl.maximum(place - HELD, 0)
    if HAS_PATHS:
        inside = from_path & (order < HELD)
        node = tl.load(nodes_ptr + request * width + node, mask=inside, other=0)
    state_ptr += layer * layer_state + row * HELD * C
    held_ptr = state_ptr + tl.minimum(place, HELD - 1)[:, None] * C + channels[None, :]
    path_ptr = inputs_ptr + layer * layer_inputs + (start + node)[:, None] * C + channels[None, :]
    x = tl.load(held_ptr, mask=mask & (~from_path)[:, None], other=0.0)
    x += tl.load(path_ptr, mask=mask & from_path[:, None], other=0.0)
    # What one line reads another writes: all reads come first.
    tl.debug_barrier()
    tl.store(state_ptr + order[:, None] * C + channels[None, :], x, mask=mask)


def verify(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    updates: NodeUpdates,
    nodes: NodeBatch,
    shape: DeltaShape,
) -> Tensor:
    mask = nodes.mask_BNN
    block_e = min(power_of_2(shape.value_dim), COLUMNS)
    out = updates.deltas.new_empty(len(given.mixed_TC), shape.num_heads, shape.value_dim)
    grid = shape.num_heads * cdiv(shape.value_dim, block_e), len(nodes.rows_B)
    tokens = node_tokens(given, weights, state, updates, nodes, shape)
    _verify_kernel[grid](
        tokens.q,
        updates.keys,
        tokens.v,
        tokens.writes,
        tokens.steps,
        state.memory,
        updates.deltas,
        out,
        nodes.rows_B,
        nodes.starts,
        nodes.rows_B if mask is None else mask,
        *((0, 0) if mask is None else (mask.stride(0), mask.stride(1))),
        G=shape.num_key_heads,
        M=shape.num_heads,
        K=shape.key_dim,
        E=shape.value_dim,
        HAS_TREE=mask is not None,
        BLOCK_N=max(2, power_of_2(nodes.width)),
        BLOCK_K=power_of_2(shape.key_dim),
        BLOCK_E=block_e,
        num_warps=4,
    )
    return out


def keep(
    states: Sequence[DeltaState],
    updates: Sequence[NodeUpdates],
    paths: StatePaths,
    shape: DeltaShape,
) -> None:
    block_e = min(power_of_2(shape.value_dim), COLUMNS)
    blocks = cdiv(shape.value_dim, block_e)
    first, update = states[0], updates[0]
    _keep_memory_kernel[shape.num_heads * blocks, len(paths.rows_B), len(states)](
        first.memory,
        update.keys,
        update.deltas,
        update.decays,
        paths.rows_B,
        paths.starts_B,
        paths.accepted_B,
        paths.rows_B if paths.nodes_BW is None else paths.nodes_BW,
        _between([one.memory for one in states]),
        _between([one.keys for one in updates]),
        _between([one.deltas for one in updates]),
        _between([one.decays for one in updates]),
        paths.width,
        G=shape.num_key_heads,
        M=shape.num_heads,
        K=shape.key_dim,
        E=shape.value_dim,
        HAS_PATHS=paths.nodes_BW is not None,
        BLOCK_K=power_of_2(shape.key_dim),
        BLOCK_E=block_e,
        num_warps=4,
    )
    _keep_inputs(states, updates, paths, shape)


def _keep_inputs(
    states: Sequence[DeltaState],
    updates: Sequence[NodeUpdates],
    paths: StatePaths,
    shape: DeltaShape,
) -> None:
    held = shape.conv_width - 1
    grid = len(paths.rows_B), cdiv(shape.channels, CHANNELS), len(states)
    _keep_inputs_kernel[grid](
        states[0].inputs,
        updates[0].inputs,
        paths.rows_B,
        paths.starts_B,
        paths.accepted_B,
        paths.rows_B if paths.nodes_BW is None else paths.nodes_BW,
        _between([one.inputs for one in states]),
        _between([one.inputs for one in updates]),
        paths.width,
        C=shape.channels,
        HELD=held,
        HAS_PATHS=paths.nodes_BW is not None,
        BLOCK_H=power_of_2(held),
        BLOCK_C=CHANNELS,
        num_warps=4,
    )


def _between(layers: Sequence[Tensor]) -> int:
    """Numbers from one layer's part of a tensor [L, ...] to the next."""
    starts = [int(one.storage_offset()) for one in layers[:2]]
    return starts[-1] - starts[0]
