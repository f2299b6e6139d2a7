"""The gated delta rule over prompts in Triton, token by token.

What tokens read is already there (delta_tokens_triton.py). A program takes a request, a head and
some columns of its memory, which stays in registers from the first token to the last.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.delta.delta_decode_triton import Form, stepped
from specengine.kernels.delta.delta_rule_triton import CHANNELS
from specengine.kernels.delta.delta_tokens_triton import prompt_tokens
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    PromptBatch,
)
from specengine.kernels.sizes import cdiv, power_of_2

# One warp: its sums need no barrier, of which each token would have two.
FORM = Form(32, 1)


@triton.jit
def _token(
    q_ptr,
    k_ptr,
    dots_ptr,
    v_ptr,
    writes_ptr,
    decays_ptr,
    at,
    end,
    group,
    head,
    k_order,
    e_order,
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    """Of token `at`; zeros from `end` on."""
    is_there = at < end
    k_real = k_order < tl.where(is_there, K, 0)
    e_real = e_order < tl.where(is_there, E, 0)
    of_keys, of_values = at * G + group, at * M + head
    q = tl.load(q_ptr + of_keys * K + k_order, mask=k_real, other=0.0)
    k = tl.load(k_ptr + of_keys * K + k_order, mask=k_real, other=0.0)
    dot = tl.load(dots_ptr + of_keys, mask=is_there, other=0.0)
    v = tl.load(v_ptr + of_values * E + e_order, mask=e_real, other=0.0)
    write = tl.load(writes_ptr + of_values, mask=is_there, other=0.0)
    decay = tl.load(decays_ptr + of_values, mask=is_there, other=0.0)
    return q, k, dot, v.to(tl.float32), write, decay


@triton.jit
def _prompt_rule_kernel(
    q_ptr,
    k_ptr,
    dots_ptr,
    v_ptr,
    writes_ptr,
    decays_ptr,
    memory_ptr,
    out_ptr,
    rows_ptr,
    starts_ptr,
    new_ptr,
    save_lens_ptr,
    save_slots_ptr,
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    SAVES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    # Programs that run beside each other read the same tokens.
    head, block, request = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    group = head // (M // G)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    k_order, e_order = tl.arange(0, BLOCK_K), block * BLOCK_E + tl.arange(0, BLOCK_E)
    e_real = e_order < E
    columns = head * K * E + k_order[:, None] * E + e_order[None, :]
    is_new = tl.load(new_ptr + request)
    known = (k_order < tl.where(is_new == 0, K, 0))[:, None] & e_real[None, :]
    memory = tl.load(memory_ptr + row * M * K * E + columns, mask=known, other=0.0)
    # A token's numbers are loaded while the one before it is computed.
    q, k, dot, v, write, decay = _token(
        q_ptr, k_ptr, dots_ptr, v_ptr, writes_ptr, decays_ptr, start, end, group, head,
        k_order, e_order, G, M, K, E,
    )  # fmt: skip
    in_memory = (k_order < K)[:, None] & e_real[None, :]
    # One loop: Triton 3.6 begins an inner one of each save's tokens at the first token again.
    save, last = request * SAVES, request * SAVES + SAVES
    stop = start
    if SAVES:
        stop = start + tl.load(save_lens_ptr + save)
    for token in range(start, end):
        q_now, k_now, dot_now, v_now, write_now, decay_now = q, k, dot, v, write, decay
        q, k, dot, v, write, decay = _token(
            q_ptr, k_ptr, dots_ptr, v_ptr, writes_ptr, decays_ptr, token + 1, end, group, head,
            k_order, e_order, G, M, K, E,
        )  # fmt: skip
        memory, out = stepped(memory, q_now, k_now, v_now, dot_now, write_now, decay_now)
        tl.store(out_ptr + (token * M + head) * E + e_order, out, mask=e_real)
        if SAVES:  # noqa: SIM102 (known when the kernel is compiled)
            if token + 1 == stop:
                slot = tl.load(save_slots_ptr + save)
                tl.store(memory_ptr + slot * M * K * E + columns, memory, mask=in_memory)
                save += 1
                # A request may have fewer saves than another: the others have the length 0.
                stop = start + tl.load(save_lens_ptr + save, mask=save < last, other=0)
    tl.store(memory_ptr + row * M * K * E + columns, memory, mask=in_memory)


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
    form: Form | None = None,
) -> Tensor:
    """delta_rule.extend; form: in place of FORM."""
    form = form or FORM
    places = batch.places
    out = state.memory.new_empty(len(given.mixed_TC), shape.num_heads, shape.value_dim)
    tokens = prompt_tokens(given, weights, state, batch, shape)
    columns = min(power_of_2(shape.value_dim), form.columns)
    grid = shape.num_heads * cdiv(shape.value_dim, columns), len(batch.rows_B)
    _prompt_rule_kernel[grid](
        tokens.q,
        tokens.k,
        tokens.dots,
        tokens.v,
        tokens.writes,
        tokens.decays,
        state.memory,
        out,
        batch.rows_B,
        places.starts,
        places.are_new,
        places.save_lens,
        places.save_slots,
        G=shape.num_key_heads,
        M=shape.num_heads,
        K=shape.key_dim,
        E=shape.value_dim,
        SAVES=places.num_saves,
        BLOCK_K=power_of_2(shape.key_dim),
        BLOCK_E=columns,
        num_warps=form.warps,
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
        _tail_kernel[len(batch.rows_B), cdiv(shape.channels, CHANNELS), max(saves, 1)](
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
            BLOCK_H=power_of_2(held),
            BLOCK_C=CHANNELS,
            num_warps=4,
        )
