"""What the gated delta rule reads of the tokens of prompts, in Triton: behind the convolution,
as queries and keys of length 1, values, writes and decays.

A program some tokens, and a head of queries and keys or a head of values: all at once, so that the
walk along the tokens (delta_prompt_triton.py) has none of it to wait for.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.delta.delta_nodes_triton import (
    log_of_decay,
    share_written,
    silu,
    weighted,
)
from specengine.kernels.delta.delta_rule_ref import NORM_EPS
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    PromptBatch,
)
from specengine.kernels.sizes import cdiv, power_of_2

_TOKENS = 16  # of a program


@triton.jit
def convolved(
    text,
    tokens,
    weights_ptr,
    places,
    is_token,
    channels,
    is_channel,
    held,
    stride,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """[tokens, channels] in float32, before the SiLU. places: of tokens within their request. text,
    tokens: where the request's held inputs and its tokens begin; held: how many of these count, all
    or none. Each is one for all tokens, or [tokens, 1]."""
    HELD: tl.constexpr = WIDTH - 1
    is_real = is_token[:, None] & is_channel[None, :]
    out = tl.zeros([places.shape[0], channels.shape[0]], tl.float32)
    for tap in tl.static_range(0, WIDTH):
        place = (places + tap)[:, None]
        is_known = (place < held) | (place >= HELD)
        text_ptr = text + tl.minimum(place, HELD - 1) * C
        token_ptr = tokens + tl.maximum(place - HELD, 0) * stride
        x_ptr = tl.where(place < HELD, text_ptr, token_ptr) + channels[None, :]
        x = tl.load(x_ptr, mask=is_real & is_known, other=0.0)
        out += weighted(x, weights_ptr, channels, is_channel, tap, WIDTH)
    return out


@triton.jit
def rows_of_length_1(x, EPS: tl.constexpr):
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 1) + EPS))[:, None]


@triton.jit(do_not_specialize=["count"])
def _prompt_tokens_kernel(
    mixed_ptr,
    write_ptr,
    decay_ptr,
    conv_ptr,
    decay_log_ptr,
    time_bias_ptr,
    state_inputs_ptr,
    q_ptr,
    k_ptr,
    dots_ptr,
    v_ptr,
    writes_ptr,
    decays_ptr,
    requests_ptr,
    rows_ptr,
    starts_ptr,
    new_ptr,
    count,
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
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    C: tl.constexpr = 2 * G * K + M * E
    part = tl.program_id(1)
    order = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = order < count
    at = tl.minimum(order, count - 1).to(tl.int64)
    request = tl.load(requests_ptr + at)
    start, row = tl.load(starts_ptr + request), tl.load(rows_ptr + request)
    # Where the text before a request begins to count: a new one has none.
    held = tl.where(tl.load(new_ptr + request) == 0, WIDTH - 1, 0)[:, None]
    text = state_inputs_ptr + (row * (WIDTH - 1) * C)[:, None]
    tokens = mixed_ptr + (start * stride_mixed)[:, None]
    places = at - start
    dtype = mixed_ptr.dtype.element_ty
    if part < G:
        k_order = tl.arange(0, BLOCK_K)
        k_real = k_order < K
        q = convolved(
            text, tokens, conv_ptr, places, is_token, part * K + k_order, k_real, held,
            stride_mixed, C, WIDTH,
        )  # fmt: skip
        k = convolved(
            text, tokens, conv_ptr, places, is_token, (G + part) * K + k_order, k_real, held,
            stride_mixed, C, WIDTH,
        )  # fmt: skip
        q = rows_of_length_1(silu(q, dtype), EPS) * SCALE
        k = rows_of_length_1(silu(k, dtype), EPS)
        heads = at * G + part
        is_key = is_token[:, None] & k_real[None, :]
        tl.store(q_ptr + heads[:, None] * K + k_order[None, :], q, mask=is_key)
        tl.store(k_ptr + heads[:, None] * K + k_order[None, :], k, mask=is_key)
        tl.store(dots_ptr + heads, tl.sum(q * k, 1), mask=is_token)
    else:
        head, e_order = part - G, tl.arange(0, BLOCK_E)
        e_real = e_order < E
        v = convolved(
            text, tokens, conv_ptr, places, is_token, 2 * G * K + head * E + e_order, e_real, held,
            stride_mixed, C, WIDTH,
        )  # fmt: skip
        heads = at * M + head
        is_value = is_token[:, None] & e_real[None, :]
        v = silu(v, dtype).to(dtype)
        tl.store(v_ptr + heads[:, None] * E + e_order[None, :], v, mask=is_value)
        written = share_written(write_ptr + at * stride_write + head, dtype)
        time_ptr = decay_ptr + at * stride_decay + head
        step = log_of_decay(time_ptr, decay_log_ptr + head, time_bias_ptr + head)
        tl.store(writes_ptr + heads, written, mask=is_token)
        tl.store(decays_ptr + heads, tl.exp(step), mask=is_token)


@dataclass(frozen=True)
class PromptTokens:
    """float32 but for v, which the inputs' type holds exactly."""

    q: Tensor  # [T, G, K], scaled
    k: Tensor  # [T, G, K]
    dots: Tensor  # [T, G], q times k
    v: Tensor  # [T, M, E]
    writes: Tensor  # [T, M]
    decays: Tensor  # [T, M]


def prompt_tokens(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    batch: PromptBatch,
    shape: DeltaShape,
) -> PromptTokens:
    places, mixed = batch.places, given.mixed_TC
    # Rows behind the last request's belong to none.
    count, groups, heads = len(places.requests), shape.num_key_heads, shape.num_heads
    wide, keys = state.memory.new_empty, (count, groups, shape.key_dim)
    made = PromptTokens(
        q=wide(keys),
        k=wide(keys),
        dots=wide(count, groups),
        v=mixed.new_empty(count, heads, shape.value_dim),
        writes=wide(count, heads),
        decays=wide(count, heads),
    )
    _prompt_tokens_kernel[cdiv(count, _TOKENS), groups + heads](
        mixed,
        given.write_TM,
        given.decay_TM,
        weights.conv_CW,
        weights.decay_log_M,
        weights.time_bias_M,
        state.inputs,
        made.q,
        made.k,
        made.dots,
        made.v,
        made.writes,
        made.decays,
        places.requests,
        batch.rows_B,
        places.starts,
        places.are_new,
        count,
        mixed.stride(0),
        given.write_TM.stride(0),
        given.decay_TM.stride(0),
        G=groups,
        M=heads,
        K=shape.key_dim,
        E=shape.value_dim,
        WIDTH=shape.conv_width,
        EPS=NORM_EPS,
        SCALE=shape.key_dim**-0.5,
        TOKENS=_TOKENS,
        BLOCK_K=power_of_2(shape.key_dim),
        BLOCK_E=power_of_2(shape.value_dim),
        num_warps=4,
    )
    return made
