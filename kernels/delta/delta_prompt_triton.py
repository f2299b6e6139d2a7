"""The gated delta rule over short prompts in Triton: a program takes a request, a head and some
columns of its memory, which stays in registers, and goes token by token."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.delta.delta_nodes_triton import of_length_1, silu, softplus, weighted
from specengine.kernels.delta.delta_rule_ref import NORM_EPS
from specengine.kernels.delta.delta_rule_triton import CHANNELS, COLUMNS
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    PromptBatch,
)


@triton.jit
def _line_tap(text_ptr, tokens_ptr, at, stride, C, channels, is_real, held, HELD: tl.constexpr):
    """The input at a place of the line: HELD inputs of the text before, then the tokens."""
    in_text = is_real & (channels < tl.where(at < held, C, 0))
    in_tokens = is_real & (channels < tl.where(at >= HELD, C, 0))
    x = tl.load(text_ptr + tl.minimum(at, HELD - 1) * C + channels, mask=in_text, other=0.0)
    token = tl.maximum(at - HELD, 0)
    return x + tl.load(tokens_ptr + token * stride + channels, mask=in_tokens, other=0.0)


@triton.jit
def _extend_kernel(
    mixed_ptr,
    write_ptr,
    decay_ptr,
    conv_ptr,
    decay_log_ptr,
    time_bias_ptr,
    state_inputs_ptr,
    memory_ptr,
    out_ptr,
    rows_ptr,
    starts_ptr,
    new_ptr,
    save_lens_ptr,
    save_slots_ptr,
    stride_mixed,
    stride_write,
    stride_decay,
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    SAVES: tl.constexpr,
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
    is_new = tl.load(new_ptr + request)
    # Where this line's text begins to count: a new request has none.
    held = tl.where(is_new == 0, HELD, 0)
    k_order, e_order = tl.arange(0, BLOCK_K), block * BLOCK_E + tl.arange(0, BLOCK_E)
    k_real, e_real = k_order < K, e_order < E
    q_channels, k_channels = group * K + k_order, (G + group) * K + k_order
    v_channels = 2 * G * K + head * E + e_order
    dtype = mixed_ptr.dtype.element_ty
    in_memory = k_real[:, None] & e_real[None, :]
    known = (k_order < tl.where(is_new == 0, K, 0))[:, None] & e_real[None, :]
    columns = k_order[:, None] * E + e_order[None, :]
    own_ptr = memory_ptr + (row * M + head) * K * E + columns
    memory = tl.load(own_ptr, mask=known, other=0.0)
    text_ptr = state_inputs_ptr + row * HELD * C
    tokens_ptr = mixed_ptr + start * stride_mixed
    rate = tl.exp(tl.load(decay_log_ptr + head).to(tl.float32))
    bias = tl.load(time_bias_ptr + head).to(tl.float32)
    for token in range(count):
        at = start + token
        q = tl.zeros([BLOCK_K], dtype=tl.float32)
        k = tl.zeros([BLOCK_K], dtype=tl.float32)
        v = tl.zeros([BLOCK_E], dtype=tl.float32)
        for tap in tl.static_range(0, WIDTH):
            place = token + tap
            x = _line_tap(
                text_ptr, tokens_ptr, place, stride_mixed, C, q_channels, k_real, held, HELD
            )
            q += weighted(x, conv_ptr, q_channels, k_real, tap, WIDTH)
            x = _line_tap(
                text_ptr, tokens_ptr, place, stride_mixed, C, k_channels, k_real, held, HELD
            )
            k += weighted(x, conv_ptr, k_channels, k_real, tap, WIDTH)
            x = _line_tap(
                text_ptr, tokens_ptr, place, stride_mixed, C, v_channels, e_real, held, HELD
            )
            v += weighted(x, conv_ptr, v_channels, e_real, tap, WIDTH)
        q = of_length_1(silu(q, dtype), EPS) * SCALE
        k = of_length_1(silu(k, dtype), EPS)
        v = silu(v, dtype)
        asked = tl.load(write_ptr + at * stride_write + head).to(tl.float32)
        write = tl.sigmoid(asked).to(dtype).to(tl.float32)
        time = tl.load(decay_ptr + at * stride_decay + head).to(tl.float32)
        memory = memory * tl.exp(-rate * softplus(time + bias))
        delta = write * (v - tl.sum(memory * k[:, None], 0))
        memory = memory + k[:, None] * delta[None, :]
        out = tl.sum(memory * q[:, None], 0)
        tl.store(out_ptr + (at * M + head) * E + e_order, out, mask=e_real)
        for save in tl.static_range(0, SAVES):
            length = tl.load(save_lens_ptr + request * SAVES + save)
            slot = tl.load(save_slots_ptr + request * SAVES + save)
            here = (k_order < tl.where(length == token + 1, K, 0))[:, None] & e_real[None, :]
            tl.store(memory_ptr + (slot * M + head) * K * E + columns, memory, mask=here)
    tl.store(own_ptr, memory, mask=in_memory)


@triton.jit
def _tail_kernel(
    state_ptr,
    mixed_ptr,
    rows_ptr,
    starts_ptr,
    new_ptr,
    lens_ptr,
    slots_ptr,
    stride_mixed,
    C: tl.constexpr,
    HELD: tl.constexpr,
    SAVES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """SAVES: of a request, each to a slot of its own; 0 is its end, to its row."""
    request, save = tl.program_id(0), tl.program_id(2)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(starts_ptr + request)
    held = tl.where(tl.load(new_ptr + request) == 0, HELD, 0)
    length = tl.load(starts_ptr + request + 1) - start
    slot = row
    if SAVES:
        length = tl.load(lens_ptr + request * SAVES + save)
        slot = tl.load(slots_ptr + request * SAVES + save)
    order = tl.arange(0, BLOCK_H)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_real = (order < tl.where(length > 0, HELD, 0))[:, None] & (channels < C)[None, :]
    place = (length + order)[:, None]
    text_ptr = state_ptr + row * HELD * C + tl.minimum(place, HELD - 1) * C
    x = tl.load(text_ptr + channels[None, :], mask=is_real & (place < held), other=0.0)
    token_ptr = mixed_ptr + (start + tl.maximum(place - HELD, 0)) * stride_mixed
    x += tl.load(token_ptr + channels[None, :], mask=is_real & (place >= HELD), other=0.0)
    # What one line reads another writes: all reads come first.
    tl.debug_barrier()
    out_ptr = state_ptr + slot * HELD * C + order[:, None] * C
    tl.store(out_ptr + channels[None, :], x, mask=is_real)


def extend(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    batch: PromptBatch,
    shape: DeltaShape,
) -> Tensor:
    places, mixed = batch.places, given.mixed_TC
    block_e = min(triton.next_power_of_2(shape.value_dim), COLUMNS)
    size = len(mixed), shape.num_heads, shape.value_dim
    out = state.memory.new_empty(size)
    grid = len(batch.rows_B), shape.num_heads, triton.cdiv(shape.value_dim, block_e)
    _extend_kernel[grid](
        mixed,
        given.write_TM,
        given.decay_TM,
        weights.conv_CW,
        weights.decay_log_M,
        weights.time_bias_M,
        state.inputs,
        state.memory,
        out,
        batch.rows_B,
        places.starts,
        places.are_new,
        places.save_lens,
        places.save_slots,
        mixed.stride(0),
        given.write_TM.stride(0),
        given.decay_TM.stride(0),
        G=shape.num_key_heads,
        M=shape.num_heads,
        K=shape.key_dim,
        E=shape.value_dim,
        WIDTH=shape.conv_width,
        EPS=NORM_EPS,
        SCALE=shape.key_dim**-0.5,
        SAVES=places.num_saves,
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        BLOCK_E=block_e,
        num_warps=4,
    )
    keep_inputs(given, state, batch, shape)
    return out


def keep_inputs(
    given: DeltaInputs, state: DeltaState, batch: PromptBatch, shape: DeltaShape
) -> None:
    """The last inputs of the convolution of each request and save, to their slots."""
    places, mixed = batch.places, given.mixed_TC
    # Saves read what the ends then write over.
    for saves in (places.num_saves, 0) if places.num_saves else (0,):
        held = shape.conv_width - 1
        _tail_kernel[len(batch.rows_B), triton.cdiv(shape.channels, CHANNELS), max(saves, 1)](
            state.inputs,
            mixed,
            batch.rows_B,
            places.starts,
            places.are_new,
            places.save_lens,
            places.save_slots,
            mixed.stride(0),
            C=shape.channels,
            HELD=held,
            SAVES=saves,
            BLOCK_H=triton.next_power_of_2(held),
            BLOCK_C=CHANNELS,
            num_warps=4,
        )
