"""Draws without replacement in Triton: a program a row, in three passes a draw."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.sample.sample_rows_ref import LEAST_WEIGHT, WEIGHT_BITS

_LEAST = tl.constexpr(LEAST_WEIGHT)
_UNIT = tl.constexpr(2.0**WEIGHT_BITS)
_MAX_BLOCK = 8192


@triton.jit
def _left(weights_ptr, place, vocab, drawn, ranks, number):
    """float32, what `number` draws have left at some places. drawn: what each of them drew."""
    left = tl.load(weights_ptr + place, mask=place < vocab, other=0.0)
    for rank in range(number):
        token = tl.sum(tl.where(ranks == rank, drawn, 0), 0)
        left = tl.where(place == token, 0.0, left)
    return left


@triton.jit
def _draw_siblings_kernel(
    weights_ptr,
    uniforms_ptr,
    tokens_ptr,
    vocab,
    stride_weights,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weights_ptr += row * stride_weights
    uniforms_ptr += row * K
    tokens_ptr += row * K
    ranks = tl.arange(0, BLOCK_K)
    drawn = tl.full([BLOCK_K], -1, tl.int32)
    scale = tl.full([], _UNIT, tl.float64)
    for rank in range(K):
        sums = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK):
            place = start + tl.arange(0, BLOCK)
            left = _left(weights_ptr, place, vocab, drawn, ranks, rank)
            sums += (left.to(tl.float64) * scale).to(tl.int64)
        total = tl.sum(sums, 0)
        target = (tl.load(uniforms_ptr + rank) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        start, before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
        token = tl.full([], -1, tl.int32)
        while start < tl.where(total > 0, vocab, 0):
            place = start + tl.arange(0, BLOCK)
            left = _left(weights_ptr, place, vocab, drawn, ranks, rank)
            weight = (left.to(tl.float64) * scale).to(tl.int64)
            sum_ = tl.sum(weight, 0)
            start += BLOCK
            if before + sum_ > target:
                reached = before + tl.cumsum(weight, 0)
                token = tl.min(tl.where(reached > target, place, vocab - 1), 0)
                start = vocab
            before += sum_
        tl.store(tokens_ptr + rank, token.to(tl.int64))
        if rank + 1 < K:
            drawn = tl.where(ranks == rank, token, drawn)
            most = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab, BLOCK):
                place = start + tl.arange(0, BLOCK)
                left = _left(weights_ptr, place, vocab, drawn, ranks, rank + 1)
                most = tl.maximum(most, left)
            largest = tl.maximum(tl.max(most, 0).to(tl.float64), _LEAST)
            # A power of two more is exact.
            scale = (1.0 / largest) * _UNIT


def draw_siblings(weights_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
    (rows, count), vocab = uniforms_RK.shape, weights_RV.shape[1]
    tokens = torch.empty(rows, count, dtype=torch.int64, device=weights_RV.device)
    if rows == 0:
        return tokens
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab))
    _draw_siblings_kernel[(rows,)](
        weights_RV,
        uniforms_RK.contiguous(),
        tokens,
        vocab,
        weights_RV.stride(0),
        K=count,
        BLOCK=block,
        BLOCK_K=triton.next_power_of_2(count),
        num_warps=max(1, min(16, block // 256)),
        enable_fp_fusion=False,
    )
    return tokens
