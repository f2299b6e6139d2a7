"""The gated delta rule over long prompts in Triton, a chunk of 64 tokens at a time.

The equations are those of delta_chunks_ref.py. Three kernels run over all chunks side by side: what
the convolution gives, as queries and keys of length 1, and as values with decays; then the
triangular system of each chunk, whose solution does not depend on the memory before it but for one
product. The last kernel goes from chunk to chunk with the memory in registers, a program a request,
a head and some columns.

The system is solved in blocks of 16 tokens, forward: repeated products of the matrix itself, which
take fewer steps, lose all digits where keys repeat.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.delta.delta_nodes_triton import silu, softplus
from specengine.kernels.delta.delta_prompt_triton import keep_inputs
from specengine.kernels.delta.delta_rule_ref import NORM_EPS
from specengine.kernels.delta.delta_tokens_triton import convolved, rows_of_length_1
from specengine.kernels.delta.types import (
    CHUNK,
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    PromptBatch,
)
from specengine.kernels.sizes import cdiv, power_of_2

_COLUMNS = 32  # of a head's memory, in one program of the last kernel
_BLOCK = 16  # tokens that are solved for one by one
assert CHUNK == 4 * _BLOCK


@triton.jit
def _keys_kernel(
    mixed_ptr,
    conv_ptr,
    text_ptr,
    q_ptr,
    k_ptr,
    rows_ptr,
    starts_ptr,
    new_ptr,
    chunks_ptr,
    stride_mixed,
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """q and k [chunks, G, CHUNK, K]: a program a chunk and a key head."""
    C: tl.constexpr = 2 * G * K + M * E
    chunk, group = tl.program_id(0), tl.program_id(1)
    request = tl.load(chunks_ptr + chunk * 4)
    first = tl.load(chunks_ptr + chunk * 4 + 1)
    count = tl.load(chunks_ptr + chunk * 4 + 2)
    held = tl.where(tl.load(new_ptr + request) == 0, WIDTH - 1, 0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    text = text_ptr + row * (WIDTH - 1) * C
    tokens = mixed_ptr + tl.load(starts_ptr + request) * stride_mixed
    order, channels = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    is_token, is_channel = order < count, channels < K
    dtype = mixed_ptr.dtype.element_ty
    out = ((chunk * G + group).to(tl.int64) * CHUNK + order[:, None]) * K + channels[None, :]
    for part in tl.static_range(0, 2):
        x = convolved(
            text,
            tokens,
            conv_ptr,
            first + order,
            is_token,
            (part * G + group) * K + channels,
            is_channel,
            held,
            stride_mixed,
            C,
            WIDTH,
        )
        x = rows_of_length_1(silu(x, dtype), EPS)
        if part == 0:
            tl.store(q_ptr + out, x * SCALE, mask=is_channel[None, :])
        else:
            tl.store(k_ptr + out, x, mask=is_channel[None, :])


@triton.jit
def _values_kernel(
    mixed_ptr,
    write_ptr,
    decay_ptr,
    conv_ptr,
    decay_log_ptr,
    time_bias_ptr,
    text_ptr,
    v_ptr,
    writes_ptr,
    kept_ptr,
    rows_ptr,
    starts_ptr,
    new_ptr,
    chunks_ptr,
    stride_mixed,
    stride_write,
    stride_decay,
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """v [chunks, M, CHUNK, E]; how much is written, and the log of the decay since the chunk began,
    [chunks, M, CHUNK]: a program a chunk and a head. Tokens that are not there write nothing and
    keep all."""
    C: tl.constexpr = 2 * G * K + M * E
    chunk, head = tl.program_id(0), tl.program_id(1)
    request = tl.load(chunks_ptr + chunk * 4)
    first = tl.load(chunks_ptr + chunk * 4 + 1)
    count = tl.load(chunks_ptr + chunk * 4 + 2)
    start = tl.load(starts_ptr + request)
    held = tl.where(tl.load(new_ptr + request) == 0, WIDTH - 1, 0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    order, channels = tl.arange(0, CHUNK), tl.arange(0, BLOCK_E)
    is_token, is_channel = order < count, channels < E
    dtype = mixed_ptr.dtype.element_ty
    x = convolved(
        text_ptr + row * (WIDTH - 1) * C,
        mixed_ptr + start * stride_mixed,
        conv_ptr,
        first + order,
        is_token,
        2 * G * K + head * E + channels,
        is_channel,
        held,
        stride_mixed,
        C,
        WIDTH,
    )
    base = (chunk * M + head).to(tl.int64) * CHUNK + order
    places = base[:, None] * E + channels[None, :]
    tl.store(v_ptr + places, silu(x, dtype), mask=is_channel[None, :])
    at = start + first + order
    asked = tl.load(write_ptr + at * stride_write + head, mask=is_token, other=0.0).to(tl.float32)
    write = tl.sigmoid(asked).to(dtype).to(tl.float32)
    tl.store(writes_ptr + base, tl.where(is_token, write, 0.0))
    time = tl.load(decay_ptr + at * stride_decay + head, mask=is_token, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(decay_log_ptr + head).to(tl.float32))
    decay_log = -rate * softplus(time + tl.load(time_bias_ptr + head).to(tl.float32))
    tl.store(kept_ptr + base, tl.cumsum(tl.where(is_token, decay_log, 0.0), 0))


@triton.jit
def _between(a, kept_i, kept_j):
    """a[i, j] times the decay from token j to a later token i; the decay from later ones, which
    would be growth, is taken as 1."""
    return a * tl.exp(tl.minimum(kept_i[:, None] - kept_j[None, :], 0.0))


@triton.jit
def _system(k_i, k_j, write_i, kept_i, kept_j, PRECISION: tl.constexpr):
    a = tl.dot(k_i, tl.trans(k_j), input_precision=PRECISION)
    return _between(a, kept_i, kept_j) * write_i[:, None]


@triton.jit
def _inverse(a, SIZE: tl.constexpr):
    """Of 1 + a's part below the diagonal, row by row."""
    order = tl.arange(0, SIZE)
    a = tl.where(order[:, None] > order[None, :], a, 0.0)
    unit = tl.where(order[:, None] == order[None, :], 1.0, 0.0)
    found = unit
    for i in tl.static_range(1, SIZE):
        is_row = order[:, None] == i
        row = tl.sum(tl.where(is_row, a, 0.0), 0)
        solved = tl.where(order == i, 1.0, 0.0) - tl.sum(row[:, None] * found, 0)
        found = tl.where(is_row, solved[None, :], found)
    return found


@triton.jit
def _solve_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    writes_ptr,
    kept_ptr,
    reads_ptr,
    attention_ptr,
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of a chunk and a head: reads [chunks, M, CHUNK, K] and, in place of v, values, so that deltas
    are ``values - reads @ memory``; and attention [chunks, M, CHUNK, CHUNK] over deltas."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    keys = (chunk * G + head // (M // G)).to(tl.int64) * CHUNK
    own = (chunk * M + head).to(tl.int64) * CHUNK
    k_order, e_order = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    is_k, is_e = (k_order < K)[None, :], (e_order < E)[None, :]

    order = tl.arange(0, CHUNK)
    places = (keys + order)[:, None] * K + k_order[None, :]
    q = tl.load(q_ptr + places, mask=is_k, other=0.0)
    k = tl.load(k_ptr + places, mask=is_k, other=0.0)
    kept = tl.load(kept_ptr + own + order)
    attention = _between(tl.dot(q, tl.trans(k), input_precision=PRECISION), kept, kept)
    attention = tl.where(order[:, None] >= order[None, :], attention, 0.0)
    tl.store(attention_ptr + (own + order)[:, None] * CHUNK + order[None, :], attention)

    t0 = tl.arange(0, SIZE)
    t1, t2, t3 = t0 + SIZE, t0 + 2 * SIZE, t0 + 3 * SIZE
    k0 = tl.load(k_ptr + (keys + t0)[:, None] * K + k_order[None, :], mask=is_k, other=0.0)
    k1 = tl.load(k_ptr + (keys + t1)[:, None] * K + k_order[None, :], mask=is_k, other=0.0)
    k2 = tl.load(k_ptr + (keys + t2)[:, None] * K + k_order[None, :], mask=is_k, other=0.0)
    k3 = tl.load(k_ptr + (keys + t3)[:, None] * K + k_order[None, :], mask=is_k, other=0.0)
    d0, d1 = tl.load(kept_ptr + own + t0), tl.load(kept_ptr + own + t1)
    d2, d3 = tl.load(kept_ptr + own + t2), tl.load(kept_ptr + own + t3)
    w0, w1 = tl.load(writes_ptr + own + t0), tl.load(writes_ptr + own + t1)
    w2, w3 = tl.load(writes_ptr + own + t2), tl.load(writes_ptr + own + t3)
    a10, a20 = _system(k1, k0, w1, d1, d0, PRECISION), _system(k2, k0, w2, d2, d0, PRECISION)
    a21, a30 = _system(k2, k1, w2, d2, d1, PRECISION), _system(k3, k0, w3, d3, d0, PRECISION)
    a31, a32 = _system(k3, k1, w3, d3, d1, PRECISION), _system(k3, k2, w3, d3, d2, PRECISION)
    i0 = _inverse(_system(k0, k0, w0, d0, d0, PRECISION), SIZE)
    i1 = _inverse(_system(k1, k1, w1, d1, d1, PRECISION), SIZE)
    i2 = _inverse(_system(k2, k2, w2, d2, d2, PRECISION), SIZE)
    i3 = _inverse(_system(k3, k3, w3, d3, d3, PRECISION), SIZE)

    x0, x1, x2, x3 = _solved(
        k0.to(tl.float32) * (w0 * tl.exp(d0))[:, None],
        k1.to(tl.float32) * (w1 * tl.exp(d1))[:, None],
        k2.to(tl.float32) * (w2 * tl.exp(d2))[:, None],
        k3.to(tl.float32) * (w3 * tl.exp(d3))[:, None],
        a10,
        a20,
        a21,
        a30,
        a31,
        a32,
        i0,
        i1,
        i2,
        i3,
        PRECISION,
    )
    tl.store(reads_ptr + (own + t0)[:, None] * K + k_order[None, :], x0, mask=is_k)
    tl.store(reads_ptr + (own + t1)[:, None] * K + k_order[None, :], x1, mask=is_k)
    tl.store(reads_ptr + (own + t2)[:, None] * K + k_order[None, :], x2, mask=is_k)
    tl.store(reads_ptr + (own + t3)[:, None] * K + k_order[None, :], x3, mask=is_k)

    p0 = v_ptr + (own + t0)[:, None] * E + e_order[None, :]
    p1 = v_ptr + (own + t1)[:, None] * E + e_order[None, :]
    p2 = v_ptr + (own + t2)[:, None] * E + e_order[None, :]
    p3 = v_ptr + (own + t3)[:, None] * E + e_order[None, :]
    x0, x1, x2, x3 = _solved(
        tl.load(p0, mask=is_e, other=0.0).to(tl.float32) * w0[:, None],
        tl.load(p1, mask=is_e, other=0.0).to(tl.float32) * w1[:, None],
        tl.load(p2, mask=is_e, other=0.0).to(tl.float32) * w2[:, None],
        tl.load(p3, mask=is_e, other=0.0).to(tl.float32) * w3[:, None],
        a10,
        a20,
        a21,
        a30,
        a31,
        a32,
        i0,
        i1,
        i2,
        i3,
        PRECISION,
    )
    tl.store(p0, x0, mask=is_e)
    tl.store(p1, x1, mask=is_e)
    tl.store(p2, x2, mask=is_e)
    tl.store(p3, x3, mask=is_e)


@triton.jit
def _solved(b0, b1, b2, b3, a10, a20, a21, a30, a31, a32, i0, i1, i2, i3, PRECISION: tl.constexpr):
    """x with (1 + a) x = b, in blocks; i0 .. i3 are the inverses of the diagonal ones."""
    x0 = tl.dot(i0, b0, input_precision=PRECISION)
    b1 -= tl.dot(a10, x0, input_precision=PRECISION)
    x1 = tl.dot(i1, b1, input_precision=PRECISION)
    b2 -= tl.dot(a20, x0, input_precision=PRECISION)
    b2 -= tl.dot(a21, x1, input_precision=PRECISION)
    x2 = tl.dot(i2, b2, input_precision=PRECISION)
    b3 -= tl.dot(a30, x0, input_precision=PRECISION)
    b3 -= tl.dot(a31, x1, input_precision=PRECISION)
    b3 -= tl.dot(a32, x2, input_precision=PRECISION)
    x3 = tl.dot(i3, b3, input_precision=PRECISION)
    return x0, x1, x2, x3


@triton.jit
def _memory_kernel(
    q_ptr,
    k_ptr,
    values_ptr,
    kept_ptr,
    reads_ptr,
    attention_ptr,
    memory_ptr,
    out_ptr,
    rows_ptr,
    starts_ptr,
    new_ptr,
    chunks_ptr,
    firsts_ptr,
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    request, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(starts_ptr + request)
    order, k_order = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    e_order = block * BLOCK_E + tl.arange(0, BLOCK_E)
    is_k, is_e = (k_order < K)[None, :], (e_order < E)[None, :]
    columns = k_order[:, None] * E + e_order[None, :]
    in_memory = (k_order < K)[:, None] & is_e
    known = (k_order < tl.where(tl.load(new_ptr + request) == 0, K, 0))[:, None] & is_e
    own_ptr = memory_ptr + (row * M + head) * K * E + columns
    memory = tl.load(own_ptr, mask=known, other=0.0)
    first, last = tl.load(firsts_ptr + request), tl.load(firsts_ptr + request + 1)
    for chunk in range(first, last):
        place = tl.load(chunks_ptr + chunk * 4 + 1)
        count = tl.load(chunks_ptr + chunk * 4 + 2)
        slot = tl.load(chunks_ptr + chunk * 4 + 3)
        keys = (chunk * G + head // (M // G)).to(tl.int64) * CHUNK + order
        own = (chunk * M + head).to(tl.int64) * CHUNK + order
        kept = tl.load(kept_ptr + own)
        whole = tl.min(kept, 0)  # which falls, and stays where there are no tokens
        reads = tl.load(reads_ptr + own[:, None] * K + k_order[None, :], mask=is_k, other=0.0)
        deltas = tl.load(values_ptr + own[:, None] * E + e_order[None, :], mask=is_e, other=0.0)
        deltas = deltas.to(tl.float32)
        deltas -= tl.dot(reads.to(tl.float32), memory, input_precision=PRECISION)
        q = tl.load(q_ptr + keys[:, None] * K + k_order[None, :], mask=is_k, other=0.0)
        q = q.to(tl.float32) * tl.exp(kept)[:, None]
        out = tl.dot(q, memory, input_precision=PRECISION)
        attention = tl.load(attention_ptr + own[:, None] * CHUNK + order[None, :])
        out = tl.dot(attention.to(tl.float32), deltas, out, input_precision=PRECISION)
        at = (start + place + order)[:, None] * M + head
        is_out = (order < count)[:, None] & is_e
        tl.store(out_ptr + at * E + e_order[None, :], out, mask=is_out)
        k = tl.load(k_ptr + keys[:, None] * K + k_order[None, :], mask=is_k, other=0.0)
        k = k.to(tl.float32) * tl.exp(whole - kept)[:, None]
        memory *= tl.exp(whole)
        memory = tl.dot(tl.trans(k), deltas, memory, input_precision=PRECISION)
        kept_rows = (k_order < tl.where(slot >= 0, K, 0))[:, None] & is_e
        kept_ptrs = memory_ptr + (tl.maximum(slot, 0).to(tl.int64) * M + head) * K * E + columns
        tl.store(kept_ptrs, memory, mask=kept_rows)
    tl.store(own_ptr, memory, mask=in_memory)


@dataclass(frozen=True)
class _Solved:
    """What the chunks of a batch hold besides the memory. Of the inputs' type but for kept."""

    q: Tensor  # [N, G, CHUNK, K]
    k: Tensor
    values: Tensor  # [N, M, CHUNK, E]
    writes: Tensor  # float32 [N, M, CHUNK]
    kept: Tensor  # float32 [N, M, CHUNK]
    reads: Tensor  # [N, M, CHUNK, K]
    attention: Tensor  # [N, M, CHUNK, CHUNK]

    @classmethod
    def empty(cls, count: int, shape: DeltaShape, like: Tensor) -> _Solved:
        def made(heads: int, *last: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.empty(count, heads, CHUNK, *last, dtype=dtype, device=like.device)

        groups, heads = shape.num_key_heads, shape.num_heads
        return cls(
            made(groups, shape.key_dim),
            made(groups, shape.key_dim),
            made(heads, shape.value_dim),
            made(heads, dtype=torch.float32),
            made(heads, dtype=torch.float32),
            made(heads, shape.key_dim),
            made(heads, CHUNK),
        )


def extend(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    batch: PromptBatch,
    shape: DeltaShape,
) -> Tensor:
    """delta_rule.extend: launches depend on the numbers of requests and chunks."""
    chunks, places, mixed = batch.chunks, batch.places, given.mixed_TC
    count, heads = len(chunks.table), shape.num_heads
    size = len(mixed), heads, shape.value_dim
    out = state.memory.new_empty(size)
    held = _Solved.empty(count, shape, mixed)
    _convolve(given, weights, state, batch, shape, held)
    sizes = _sizes(shape)
    keys, values = _block(shape.key_dim), _block(shape.value_dim)
    # Sums of products in full for float32, with 10 bits of mantissa beside bfloat16.
    precision = "ieee" if mixed.dtype == torch.float32 else "tf32"
    _solve_kernel[count, heads](
        held.q,
        held.k,
        held.values,
        held.writes,
        held.kept,
        held.reads,
        held.attention,
        **sizes,
        SIZE=_BLOCK,
        BLOCK_K=keys,
        BLOCK_E=values,
        PRECISION=precision,
        num_warps=4,
    )
    columns = min(values, _COLUMNS)
    _memory_kernel[len(batch.rows_B), heads, cdiv(shape.value_dim, columns)](
        held.q,
        held.k,
        held.values,
        held.kept,
        held.reads,
        held.attention,
        state.memory,
        out,
        batch.rows_B,
        places.starts,
        places.are_new,
        chunks.table,
        chunks.firsts,
        **sizes,
        BLOCK_K=keys,
        BLOCK_E=columns,
        PRECISION=precision,
        num_warps=4,
        num_stages=2,
    )
    keep_inputs(given, state, batch, shape)
    return out


def _convolve(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    batch: PromptBatch,
    shape: DeltaShape,
    held: _Solved,
) -> None:
    chunks, places, mixed = batch.chunks, batch.places, given.mixed_TC
    where = batch.rows_B, places.starts, places.are_new, chunks.table
    _keys_kernel[len(chunks.table), shape.num_key_heads](
        mixed,
        weights.conv_CW,
        state.inputs,
        held.q,
        held.k,
        *where,
        mixed.stride(0),
        **_sizes(shape),
        WIDTH=shape.conv_width,
        EPS=NORM_EPS,
        SCALE=shape.key_dim**-0.5,
        BLOCK_K=_block(shape.key_dim),
        num_warps=8,
    )
    _values_kernel[len(chunks.table), shape.num_heads](
        mixed,
        given.write_TM,
        given.decay_TM,
        weights.conv_CW,
        weights.decay_log_M,
        weights.time_bias_M,
        state.inputs,
        held.values,
        held.writes,
        held.kept,
        *where,
        mixed.stride(0),
        given.write_TM.stride(0),
        given.decay_TM.stride(0),
        **_sizes(shape),
        WIDTH=shape.conv_width,
        BLOCK_E=_block(shape.value_dim),
        num_warps=8,
    )


def _sizes(shape: DeltaShape) -> dict[str, Any]:
    return {
        "G": shape.num_key_heads,
        "M": shape.num_heads,
        "K": shape.key_dim,
        "E": shape.value_dim,
        "CHUNK": CHUNK,
    }


def _block(size: int) -> int:
    return max(power_of_2(size), 16)
