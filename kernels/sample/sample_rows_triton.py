"""Tokens and weights from logits in Triton: a program a row, in passes over what it has written.

Thresholds of top-k and top-p are found by halving the interval of float bits in which they lie;
each pass also tells the values next to the middle, so that the interval ends as soon as it holds a
single value.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.sample.keyed_uniform_ref import GOLDEN, MIX_1, MIX_2
from specengine.kernels.sample.sample_rows_ref import (
    LEAST_WEIGHT,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOWEST,
    SERIES,
    WEIGHT_BITS,
)
from specengine.kernels.sample.types import ChoiceTable, DrawPlaces

_LOG2_E, _LN2_HIGH, _LN2_LOW = (tl.constexpr(x) for x in (LOG2_E, LN2_HIGH, LN2_LOW))
_LOWEST = tl.constexpr(LOWEST)
_LEAST = tl.constexpr(LEAST_WEIGHT)
_SIXTH, _FIFTH, _FOURTH, _THIRD, _SECOND = (tl.constexpr(x) for x in SERIES[:5])
_UNIT = tl.constexpr(2.0**WEIGHT_BITS)
_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(x) for x in (GOLDEN, MIX_1, MIX_2))
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the best token's
_MOST = tl.constexpr(0x7FFFFFFF)
_MAX_BLOCK = 8192


@triton.jit
def _exp_below(x):
    """As sample_rows_ref.exp_below_, operation by operation."""
    x = tl.where(x > _LOWEST, x, _LOWEST)
    powers = tl.floor(x * _LOG2_E + 0.5)
    rest = (x - powers * _LN2_HIGH) - powers * _LN2_LOW
    series = rest * _SIXTH + _FIFTH
    series = (series * rest + _FOURTH) * rest + _THIRD
    series = ((series * rest + _SECOND) * rest + 1.0) * rest + 1.0
    return series * ((powers.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _fixed(e):
    return (e * _UNIT).to(tl.int64)


@triton.jit
def _best(logits_ptr, vocab, BLOCK: tl.constexpr):
    """The largest logit and its first place."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    places = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + place, mask=place < vocab, other=float("-inf"))
        places = tl.where(x > largest, place, places)
        largest = tl.maximum(largest, x)
    best = tl.max(largest, 0)
    return best, tl.min(tl.where(largest == best, places, _MOST), 0)


@triton.jit
def _write_e(logits_ptr, e_ptr, vocab, best, temperature, BLOCK: tl.constexpr):
    """-> the weight of all."""
    weight = tl.zeros([BLOCK], tl.int64)
    top = tl.div_rn(best, temperature)
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + place, mask=place < vocab, other=float("-inf"))
        e = _exp_below(tl.div_rn(x, temperature) - top)
        tl.store(e_ptr + place, e, mask=place < vocab)
        weight += _fixed(e)
    return tl.sum(weight, 0)


@triton.jit
def _above(e_ptr, vocab, pivot, by_weight, BLOCK: tl.constexpr):
    """What lies above a pivot, by weight or number; the largest value up to it, and the smallest
    above it. Values are float bits."""
    amount = tl.zeros([BLOCK], tl.int64)
    below, above = tl.full([BLOCK], -1, tl.int32), tl.full([BLOCK], _MOST, tl.int32)
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        e = tl.load(e_ptr + place, mask=place < vocab, other=-1.0)
        bits = e.to(tl.int32, bitcast=True)
        is_above = bits > pivot
        amount += tl.where(is_above, tl.where(by_weight, _fixed(e), 1), 0)
        below = tl.maximum(below, tl.where(is_above, -1, bits))
        above = tl.minimum(above, tl.where(is_above, bits, _MOST))
    return tl.sum(amount, 0), tl.max(below, 0), tl.min(above, 0)


@triton.jit
def _threshold(e_ptr, vocab, limit, by_weight, BLOCK: tl.constexpr):
    """The smallest value such that what lies above it amounts to less than limit."""
    low, high = tl.full([], -1, tl.int32), tl.full([], _ONE, tl.int32)
    while high - low > 1:
        pivot = low + (high - low) // 2
        amount, below, above = _above(e_ptr, vocab, pivot, by_weight, BLOCK)
        fits = amount.to(tl.float64) < limit
        high = tl.where(fits, tl.maximum(below, low + 1), high)
        low = tl.where(fits, low, tl.minimum(above, high) - 1)
    return high


@triton.jit
def _floor(e_ptr, vocab, total, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """The bits of the least e that stays."""
    floor = min_p.to(tl.int32, bitcast=True)
    if top_k < vocab:
        kth = _threshold(e_ptr, vocab, top_k.to(tl.float64), False, BLOCK)
        number, _, _ = _above(e_ptr, vocab, kth, False, BLOCK)
        weight, _, _ = _above(e_ptr, vocab, kth, True, BLOCK)
        total = weight + (top_k - number) * _fixed(kth.to(tl.float32, bitcast=True))
        floor = tl.maximum(floor, kth)
    if top_p < 1.0:
        limit = top_p * total.to(tl.float64)
        floor = tl.maximum(floor, _threshold(e_ptr, vocab, limit, True, BLOCK))
    return floor


@triton.jit
def _find(e_ptr, vocab, floor, target, BLOCK: tl.constexpr):
    """The first place up to which the weight of what stays exceeds the target."""
    start, before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    token = vocab - 1
    while start < vocab:
        place = start + tl.arange(0, BLOCK)
        e = tl.load(e_ptr + place, mask=place < vocab, other=-1.0)
        kept = e.to(tl.int32, bitcast=True) >= floor
        weight = tl.where(kept, _fixed(e), 0)
        sum_ = tl.sum(weight, 0)
        start += BLOCK
        if before + sum_ > target:
            reached = before + tl.cumsum(weight, 0)
            token = tl.min(tl.where(reached > target, place, vocab - 1), 0)
            start = vocab
        before += sum_
    return token


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position, offset):
    """As keyed_uniform; offset: of the stream."""
    key = _mix(seed.to(tl.uint64, bitcast=True) + offset)
    hashed = _mix(key + position.to(tl.uint64, bitcast=True) * _GOLDEN)
    return (hashed >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _cut(e_ptr, vocab, floor, BLOCK: tl.constexpr):
    """0 for what lies below the floor, or has no weight. floor: float bits."""
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        e = tl.load(e_ptr + place, mask=place < vocab, other=0.0)
        kept = (e.to(tl.int32, bitcast=True) >= floor) & (e >= _LEAST)
        tl.store(e_ptr + place, tl.where(kept, e, 0.0), mask=place < vocab)


@triton.jit
def _put_all_on(e_ptr, vocab, token, BLOCK: tl.constexpr):
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(e_ptr + place, tl.where(place == token, 1.0, 0.0), mask=place < vocab)


@triton.jit(do_not_specialize=["nodes"])
def _sample_rows_kernel(
    logits_ptr, e_ptr, words_ptr, slots_ptr, starts_ptr, depths_ptr, out_ptr, vocab, nodes,
    stride_logits, stride_e, stride_slot, stride_word,
    HAS_DEPTHS: tl.constexpr, OFFSET: tl.constexpr, WEIGHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """WEIGHS: leave at `e` what the tokens are drawn from, of greedy rows as of all others."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    e_ptr += row * stride_e
    words_ptr += tl.load(slots_ptr + row // nodes) * stride_slot
    temperature = tl.load(words_ptr).to(tl.float64, bitcast=True).to(tl.float32)
    best, token = _best(logits_ptr, vocab, BLOCK)
    if temperature > 0.0:
        top_k = tl.load(words_ptr + stride_word)
        top_p = tl.load(words_ptr + 2 * stride_word).to(tl.float64, bitcast=True)
        min_p = tl.load(words_ptr + 3 * stride_word).to(tl.float64, bitcast=True).to(tl.float32)
        seed = tl.load(words_ptr + 4 * stride_word)
        position = tl.load(starts_ptr + row // nodes) + tl.load(words_ptr + 5 * stride_word)
        position += tl.load(depths_ptr + row) if HAS_DEPTHS else row % nodes
        total = _write_e(logits_ptr, e_ptr, vocab, best, temperature, BLOCK)
        tl.debug_barrier()  # other threads of the program read what each wrote
        floor = _floor(e_ptr, vocab, total, top_k, top_p, min_p, BLOCK)
        if floor > 0:
            total, _, _ = _above(e_ptr, vocab, floor - 1, True, BLOCK)
        target = (_uniform(seed, position, OFFSET) * total.to(tl.float64)).to(tl.int64)
        token = _find(e_ptr, vocab, floor, tl.minimum(target, total - 1), BLOCK)
        if WEIGHS:
            tl.debug_barrier()  # all have read before any writes
            _cut(e_ptr, vocab, floor, BLOCK)
    elif WEIGHS:
        tl.debug_barrier()  # all have read the logits that are written over
        _put_all_on(e_ptr, vocab, token, BLOCK)
    tl.store(out_ptr + row, token.to(tl.int64))


def sample_rows(
    logits_RV: Tensor, table: ChoiceTable, places: DrawPlaces, stream: int, in_place: bool
) -> Tensor:
    e_RV = logits_RV if in_place else torch.empty_like(logits_RV)
    return _launch(logits_RV, e_RV, table, places, stream, weighs=False)


def weigh_rows(logits_RV: Tensor, table: ChoiceTable, places: DrawPlaces, stream: int) -> Tensor:
    return _launch(logits_RV, logits_RV, table, places, stream, weighs=True)


def _launch(
    logits_RV: Tensor,
    e_RV: Tensor,
    table: ChoiceTable,
    places: DrawPlaces,
    stream: int,
    weighs: bool,
) -> Tensor:
    rows, vocab = logits_RV.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows == 0:
        return out
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab))
    _sample_rows_kernel[(rows,)](
        logits_RV,
        e_RV,
        table.words,
        places.slots_B,
        places.starts_B,
        out if places.depths_R is None else places.depths_R,
        out,
        vocab,
        places.nodes,
        logits_RV.stride(0),
        e_RV.stride(0),
        *table.words.stride(),
        HAS_DEPTHS=places.depths_R is not None,
        OFFSET=GOLDEN * (stream + 1) % 2**64,
        WEIGHS=weighs,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        # A product added in one rounding would not be what other devices give.
        enable_fp_fusion=False,
    )
    return out
