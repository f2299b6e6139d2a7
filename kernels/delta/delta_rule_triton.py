"""The gated delta rule at verified nodes in Triton, and what moves states on by accepted paths.

A program of `verify` takes a request, a head and some columns of its memory, which it reads once.
It goes through the nodes in their order, and needs no state of theirs: with S the memory before the
tree and D[i, j] the decay between a node and one that it sees,

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

from specengine.kernels.delta.delta_rule_ref import NORM_EPS
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    NodeBatch,
    NodeUpdates,
    StatePaths,
)

COLUMNS = 32  # of a head's memory, in one program
CHANNELS = 512  # of the convolution's inputs, in one program


@triton.jit
def _tap(x, weights_ptr, channels, is_real, tap, WIDTH: tl.constexpr):
    """One input of the convolution, weighted."""
    weight = tl.load(weights_ptr + channels * WIDTH + tap, mask=is_real, other=0.0)
    return x.to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _silu(x, dtype: tl.constexpr):
    return (x * tl.sigmoid(x)).to(dtype).to(tl.float32)


@triton.jit
def _of_length_1(x, EPS: tl.constexpr):
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) + EPS))


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _verify_kernel(
    mixed_ptr,
    write_ptr,
    decay_ptr,
    conv_ptr,
    decay_log_ptr,
    time_bias_ptr,
    state_inputs_ptr,
    memory_ptr,
    inputs_ptr,
    keys_ptr,
    deltas_ptr,
    decays_ptr,
    out_ptr,
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
    WRITES_MEMORY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    C: tl.constexpr = 2 * G * K + M * E
    HELD: tl.constexpr = WIDTH - 1
    request, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = head // (M // G)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    k_order, e_order = tl.arange(0, BLOCK_K), block * BLOCK_E + tl.arange(0, BLOCK_E)
    k_real, e_real = k_order < K, e_order < E
    n_order = tl.arange(0, BLOCK_N)
    q_channels, k_channels = group * K + k_order, (G + group) * K + k_order
    v_channels = 2 * G * K + head * E + e_order
    dtype = mixed_ptr.dtype.element_ty

    # Slot 0 is of padding, and read as zeros.
    held = tl.where(row != 0, HELD, 0)
    places = ((row * M + head) * K + k_order[:, None]) * E + e_order[None, :]
    in_memory = (k_order < tl.where(row != 0, K, 0))[:, None] & e_real[None, :]
    memory = tl.load(memory_ptr + places, mask=in_memory, other=0.0)
    text_ptr = state_inputs_ptr + row * HELD * C

    rate = tl.exp(tl.load(decay_log_ptr + head).to(tl.float32))
    bias = tl.load(time_bias_ptr + head).to(tl.float32)
    keys = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    deltas = tl.zeros([BLOCK_N, BLOCK_E], dtype=tl.float32)
    kept = tl.zeros([BLOCK_N], dtype=tl.float32)  # log of the decay since the tree began
    for node in range(count):
        seen = n_order < node
        if HAS_TREE:
            mask_row = mask_ptr + request * stride_mask_b + node * stride_mask_n
            seen = seen & (tl.load(mask_row + n_order, mask=seen, other=0) != 0)
        depth = tl.sum(seen.to(tl.int32), 0)
        at = start + node
        own_ptr = mixed_ptr + at * stride_mixed
        q_raw = tl.load(own_ptr + q_channels, mask=k_real, other=0.0)
        k_raw = tl.load(own_ptr + k_channels, mask=k_real, other=0.0)
        v_raw = tl.load(own_ptr + v_channels, mask=e_real, other=0.0)
        q = _tap(q_raw, conv_ptr, q_channels, k_real, HELD, WIDTH)
        k = _tap(k_raw, conv_ptr, k_channels, k_real, HELD, WIDTH)
        v = _tap(v_raw, conv_ptr, v_channels, e_real, HELD, WIDTH)
        ancestor = node
        parent = node
        for back in tl.static_range(1, WIDTH):
            ancestor = tl.max(tl.where(seen & (n_order < ancestor), n_order, -1), 0)
            if back == 1:
                parent = ancestor
            # Inputs of the tree as far as it is deep, then those of the text before it.
            near_k = k_order < tl.where(depth >= back, K, 0)
            near_e = e_real & (e_order < tl.where(depth >= back, E, 0))
            far_k = k_order < tl.where(depth < tl.minimum(back, held), K, 0)
            far_e = e_real & (e_order < tl.where(depth < tl.minimum(back, held), E, 0))
            x_ptr = mixed_ptr + (start + tl.maximum(ancestor, 0)) * stride_mixed
            t_ptr = text_ptr + tl.minimum(HELD - back + depth, HELD - 1) * C
            x = tl.load(x_ptr + q_channels, mask=near_k, other=0.0)
            x += tl.load(t_ptr + q_channels, mask=far_k, other=0.0)
            q += _tap(x, conv_ptr, q_channels, k_real, HELD - back, WIDTH)
            x = tl.load(x_ptr + k_channels, mask=near_k, other=0.0)
            x += tl.load(t_ptr + k_channels, mask=far_k, other=0.0)
            k += _tap(x, conv_ptr, k_channels, k_real, HELD - back, WIDTH)
            x = tl.load(x_ptr + v_channels, mask=near_e, other=0.0)
            x += tl.load(t_ptr + v_channels, mask=far_e, other=0.0)
            v += _tap(x, conv_ptr, v_channels, e_real, HELD - back, WIDTH)
        q = _of_length_1(_silu(q, dtype), EPS) * SCALE
        k = _of_length_1(_silu(k, dtype), EPS)
        v = _silu(v, dtype)
        asked = tl.load(write_ptr + at * stride_write + head).to(tl.float32)
        write = tl.sigmoid(asked).to(dtype).to(tl.float32)
        time = tl.load(decay_ptr + at * stride_decay + head).to(tl.float32)
        step = -rate * _softplus(time + bias)
        since = step + tl.sum(tl.where(n_order == parent, kept, 0.0) * (depth > 0), 0)
        between = tl.where(seen, tl.exp(since - tl.where(seen, kept, since)), 0.0)
        whole = tl.exp(since)
        near = between * tl.sum(keys * k[None, :], 1)
        read = whole * tl.sum(memory * k[:, None], 0) + tl.sum(near[:, None] * deltas, 0)
        delta = write * (v - read)
        near = between * tl.sum(keys * q[None, :], 1)
        out = whole * tl.sum(memory * q[:, None], 0) + tl.sum(near[:, None] * deltas, 0)
        out += tl.sum(q * k, 0) * delta
        tl.store(out_ptr + (at * M + head) * E + e_order, out, mask=e_real)
        keys = tl.where(n_order[:, None] == node, k[None, :], keys)
        deltas = tl.where(n_order[:, None] == node, delta[None, :], deltas)
        kept = tl.where(n_order == node, since, kept)
        tl.store(deltas_ptr + (at * M + head) * E + e_order, delta, mask=e_real)
        tl.store(inputs_ptr + at * C + v_channels, v_raw, mask=e_real)
        if block == 0:
            tl.store(decays_ptr + at * M + head, tl.exp(step))
            if head % (M // G) == 0:
                tl.store(keys_ptr + (at * G + group) * K + k_order, k, mask=k_real)
                tl.store(inputs_ptr + at * C + q_channels, q_raw, mask=k_real)
                tl.store(inputs_ptr + at * C + k_channels, k_raw, mask=k_real)
        if WRITES_MEMORY:
            moved = memory * tl.exp(step) + k[:, None] * delta[None, :]
            tl.store(memory_ptr + places, moved, mask=in_memory)


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
    request, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
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
    HAS_ACCEPTED: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    request, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(starts_ptr + request)
    stand = 1
    if HAS_ACCEPTED:
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
    writes_memory: bool = False,
) -> Tensor:
    """writes_memory: of one node a request, whose memory then stands."""
    mixed, mask = given.mixed_TC, nodes.mask_BNN
    block_e = min(triton.next_power_of_2(shape.value_dim), COLUMNS)
    out = updates.deltas.new_empty(len(mixed), shape.num_heads, shape.value_dim)
    grid = len(nodes.rows_B), shape.num_heads, triton.cdiv(shape.value_dim, block_e)
    strides = (0, 0) if mask is None else (mask.stride(0), mask.stride(1))
    _verify_kernel[grid](
        mixed,
        given.write_TM,
        given.decay_TM,
        weights.conv_CW,
        weights.decay_log_M,
        weights.time_bias_M,
        state.inputs,
        state.memory,
        updates.inputs,
        updates.keys,
        updates.deltas,
        updates.decays,
        out,
        nodes.rows_B,
        nodes.starts,
        nodes.rows_B if mask is None else mask,
        mixed.stride(0),
        given.write_TM.stride(0),
        given.decay_TM.stride(0),
        *strides,
        G=shape.num_key_heads,
        M=shape.num_heads,
        K=shape.key_dim,
        E=shape.value_dim,
        WIDTH=shape.conv_width,
        EPS=NORM_EPS,
        SCALE=shape.key_dim**-0.5,
        HAS_TREE=mask is not None,
        WRITES_MEMORY=writes_memory,
        BLOCK_N=max(2, triton.next_power_of_2(nodes.width)),
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        BLOCK_E=block_e,
        num_warps=4,
    )
    return out


def decode(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    updates: NodeUpdates,
    nodes: NodeBatch,
    shape: DeltaShape,
) -> Tensor:
    out = verify(given, weights, state, updates, nodes, shape, writes_memory=True)
    paths = StatePaths(nodes.rows_B, nodes.starts, nodes.rows_B, None, 1)
    _keep_inputs([state], [updates], paths, shape, has_accepted=False)
    return out


def keep(
    states: Sequence[DeltaState],
    updates: Sequence[NodeUpdates],
    paths: StatePaths,
    shape: DeltaShape,
) -> None:
    block_e = min(triton.next_power_of_2(shape.value_dim), COLUMNS)
    blocks = triton.cdiv(shape.value_dim, block_e)
    first, update = states[0], updates[0]
    _keep_memory_kernel[len(paths.rows_B), shape.num_heads * blocks, len(states)](
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
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        BLOCK_E=block_e,
        num_warps=4,
    )
    _keep_inputs(states, updates, paths, shape)


def _keep_inputs(
    states: Sequence[DeltaState],
    updates: Sequence[NodeUpdates],
    paths: StatePaths,
    shape: DeltaShape,
    has_accepted: bool = True,
) -> None:
    held = shape.conv_width - 1
    grid = len(paths.rows_B), triton.cdiv(shape.channels, CHANNELS), len(states)
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
        HAS_ACCEPTED=has_accepted,
        HAS_PATHS=paths.nodes_BW is not None,
        BLOCK_H=triton.next_power_of_2(held),
        BLOCK_C=CHANNELS,
        num_warps=4,
    )


def _between(layers: Sequence[Tensor]) -> int:
    """Numbers from one layer's part of a tensor [L, ...] to the next."""
    starts = [int(one.storage_offset()) for one in layers[:2]]
    return starts[-1] - starts[0]
