"""The gated delta rule of one token a request in Triton, in two kernels.

The first makes what the rule reads: a program a request and a head of keys (with its queries), or
of values. It also moves on the inputs of the convolution, of which no other program reads its
channels; on Hopper it fetches them while the product before it runs. The second takes a request, a
head and some columns of its memory, which it reads and writes once; on Hopper it fetches them while
the first kernel runs.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.delta.delta_nodes_triton import (
    log_of_decay,
    of_length_1,
    share_written,
    silu,
)
from specengine.kernels.delta.delta_rule_ref import NORM_EPS
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    NodeBatch,
)
from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.sizes import cdiv, power_of_2


@dataclass(frozen=True)
class Form:
    """Of a program of the rule: columns of a head's memory, and warps. Both decide the order of a
    sum, so that they must not depend on how many requests there are."""

    columns: int
    warps: int


# On an H200 the fastest of 9 from 64 requests on, and 2% behind at fewer
# (benchmarks/kernels/delta_forms.py).
FORM = Form(64, 2)


@triton.jit
def _kept(conv_ptr, text_ptr, channels, is_real, is_held, C: tl.constexpr, WIDTH: tl.constexpr):
    """Of some channels the weights of the convolution, and the inputs that the state has: what is
    complete before this forward's first layer, and may be read before the wait. Both begin with the
    latest."""
    HELD: tl.constexpr = WIDTH - 1
    weights = (tl.load(conv_ptr + channels * WIDTH + HELD, mask=is_real, other=0.0),)
    held = ()
    for back in tl.static_range(1, WIDTH):
        tap = channels * WIDTH + (HELD - back)
        weights += (tl.load(conv_ptr + tap, mask=is_real, other=0.0),)  # type: ignore[assignment]
        place = text_ptr + (HELD - back) * C + channels
        held += (tl.load(place, mask=is_held, other=0.0),)  # type: ignore[assignment]
    return weights, held


@triton.jit
def _convolved(raw, weights, held, text_ptr, channels, is_held, C: tl.constexpr):
    """The convolution at a token, behind its SiLU; its inputs move on. The sum's order is that of
    verified nodes."""
    HELD: tl.constexpr = len(held)
    x = raw.to(tl.float32) * weights[0].to(tl.float32)
    later = raw
    tl.debug_barrier()  # what one thread has read another may write
    for back in tl.static_range(HELD):
        x += held[back].to(tl.float32) * weights[back + 1].to(tl.float32)
        tl.store(text_ptr + (HELD - 1 - back) * C + channels, later, mask=is_held)
        later = held[back]
    return silu(x, raw.dtype)


@triton.jit
def _token_kernel(
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
    rows_ptr,
    starts_ptr,
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
    DEPENDENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    C: tl.constexpr = 2 * G * K + M * E
    request, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + request).to(tl.int64)
    at = tl.load(starts_ptr + request)
    text_ptr = state_inputs_ptr + row * (WIDTH - 1) * C
    mixed_ptr += at * stride_mixed
    # Slot 0 is of padding, and read as zeros.
    k_order, e_order = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    k_real, k_held = k_order < K, k_order < tl.where(row != 0, K, 0)
    e_real, e_held = e_order < E, e_order < tl.where(row != 0, E, 0)
    if part < G:
        q_channels, k_channels = part * K + k_order, (G + part) * K + k_order
        q_weights, q_text = _kept(conv_ptr, text_ptr, q_channels, k_real, k_held, C, WIDTH)
        k_weights, k_text = _kept(conv_ptr, text_ptr, k_channels, k_real, k_held, C, WIDTH)
        if DEPENDENT:
            # In this order: what starts behind this kernel reads memory that was written before it.
            gdc_wait()
            gdc_launch_dependents()
        q_raw = tl.load(mixed_ptr + q_channels, mask=k_real, other=0.0)
        k_raw = tl.load(mixed_ptr + k_channels, mask=k_real, other=0.0)
        q = _convolved(q_raw, q_weights, q_text, text_ptr, q_channels, k_held, C)
        k = _convolved(k_raw, k_weights, k_text, text_ptr, k_channels, k_held, C)
        q, k = of_length_1(q, EPS) * SCALE, of_length_1(k, EPS)
        place = at * G + part
        tl.store(q_ptr + place * K + k_order, q, mask=k_real)
        tl.store(k_ptr + place * K + k_order, k, mask=k_real)
        tl.store(dots_ptr + place, tl.sum(q * k, 0))
    else:
        head = part - G
        channels = 2 * G * K + head * E + e_order
        weights, text = _kept(conv_ptr, text_ptr, channels, e_real, e_held, C, WIDTH)
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        raw = tl.load(mixed_ptr + channels, mask=e_real, other=0.0)
        write = share_written(write_ptr + at * stride_write + head, mixed_ptr.dtype.element_ty)
        time_ptr = decay_ptr + at * stride_decay + head
        step = log_of_decay(time_ptr, decay_log_ptr + head, time_bias_ptr + head)
        v = _convolved(raw, weights, text, text_ptr, channels, e_held, C)
        place = at * M + head
        tl.store(v_ptr + place * E + e_order, v, mask=e_real)
        tl.store(writes_ptr + place, write)
        tl.store(decays_ptr + place, tl.exp(step))


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def stepped(memory, q, k, v, dot, write, decay):
    """A token's rule: memory [K, E] behind it, and its output [E]. dot: q times k."""
    read, out = tl.reduce((memory * k[:, None], memory * q[:, None]), 0, _add_pairs)
    delta = write * (v - decay * read)
    return memory * decay + k[:, None] * delta[None, :], decay * out + dot * delta


@triton.jit
def _step_kernel(
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
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    # Programs that run beside each other read neighbouring memory.
    head, block, request = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    row = tl.load(rows_ptr + request).to(tl.int64)
    at = tl.load(starts_ptr + request)
    k_order, e_order = tl.arange(0, BLOCK_K), block * BLOCK_E + tl.arange(0, BLOCK_E)
    k_real, e_real = k_order < K, e_order < E
    # Slot 0 is of padding, and read as zeros.
    in_memory = (k_order < tl.where(row != 0, K, 0))[:, None] & e_real[None, :]
    memory_ptr += (row * M + head) * K * E + k_order[:, None] * E + e_order[None, :]
    memory = tl.load(memory_ptr, mask=in_memory, other=0.0)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    group, place = at * G + head // (M // G), at * M + head
    q = tl.load(q_ptr + group * K + k_order, mask=k_real, other=0.0)
    k = tl.load(k_ptr + group * K + k_order, mask=k_real, other=0.0)
    v = tl.load(v_ptr + place * E + e_order, mask=e_real, other=0.0)
    write, decay = tl.load(writes_ptr + place), tl.load(decays_ptr + place)
    dot = tl.load(dots_ptr + group)
    memory, out = stepped(memory, q, k, v, dot, write, decay)
    tl.store(out_ptr + place * E + e_order, out, mask=e_real)
    tl.store(memory_ptr, memory, mask=in_memory)


def decode(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    nodes: NodeBatch,
    shape: DeltaShape,
    form: Form | None = None,
) -> Tensor:
    """delta_rule.decode; form: in place of FORM."""
    form = form or FORM
    mixed = given.mixed_TC
    count, groups, heads = len(mixed), shape.num_key_heads, shape.num_heads
    key, value = shape.key_dim, shape.value_dim
    sizes = ((groups, key), (groups, key), (groups,), (heads, value), (heads,), (heads,))
    tokens = [mixed.new_empty(count, *size, dtype=torch.float32) for size in sizes]
    out = mixed.new_empty(count, heads, value, dtype=torch.float32)
    dependent = has_dependent_launch(mixed)
    launch = {"launch_pdl": True} if dependent else {}
    sizes_of = {"G": groups, "M": heads, "K": key, "E": value, "DEPENDENT": dependent}
    block_k, block_e = power_of_2(key), power_of_2(value)
    _token_kernel[len(nodes.rows_B), groups + heads](
        mixed,
        given.write_TM,
        given.decay_TM,
        weights.conv_CW,
        weights.decay_log_M,
        weights.time_bias_M,
        state.inputs,
        *tokens,
        nodes.rows_B,
        nodes.starts,
        mixed.stride(0),
        given.write_TM.stride(0),
        given.decay_TM.stride(0),
        WIDTH=shape.conv_width,
        EPS=NORM_EPS,
        SCALE=key**-0.5,
        BLOCK_K=block_k,
        BLOCK_E=block_e,
        num_warps=1,
        **sizes_of,
        **launch,
    )
    columns = min(block_e, form.columns)
    _step_kernel[heads * cdiv(value, columns), len(nodes.rows_B)](
        *tokens,
        state.memory,
        out,
        nodes.rows_B,
        nodes.starts,
        BLOCK_K=block_k,
        BLOCK_E=columns,
        num_warps=form.warps,
        **sizes_of,
        **launch,
    )
    return out
