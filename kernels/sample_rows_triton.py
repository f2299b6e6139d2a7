"""Tokens from logits in Triton: a program a row, in passes over what it has written.

Thresholds of top-k and top-p are found by halving the interval of float bits in which they lie: in
passes over the row until the interval holds no more values than a block, and then among these.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.keyed_uniform_ref import GOLDEN, MIX_1, MIX_2
from specengine.kernels.sample_rows_ref import (
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOWEST,
    SERIES,
    WEIGHT_BITS,
)

if TYPE_CHECKING:
    from specengine.kernels.sample_rows import ChoiceTable, Places

_LOG2_E, _LN2_HIGH, _LN2_LOW = (tl.constexpr(x) for x in (LOG2_E, LN2_HIGH, LN2_LOW))
_LOWEST = tl.constexpr(LOWEST)
_SIXTH, _FIFTH, _FOURTH, _THIRD, _SECOND = (tl.constexpr(x) for x in SERIES[:5])
_UNIT = tl.constexpr(2.0**WEIGHT_BITS)
_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(x) for x in (GOLDEN, MIX_1, MIX_2))
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the best token's
_NONE = tl.constexpr(-1082130432)  # of -1.0
_MOST = tl.constexpr(0x7FFFFFFF)
_MAX_BLOCK, _MAX_WARPS = 8192, 16


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
    """-> the weight of all, and the smallest bits."""
    weight, least = tl.zeros([BLOCK], tl.int64), tl.full([BLOCK], _ONE, tl.int32)
    top = tl.div_rn(best, temperature)
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + place, mask=place < vocab, other=float("-inf"))
        e = _exp_below(tl.div_rn(x, temperature) - top)
        tl.store(e_ptr + place, e, mask=place < vocab)
        weight += _fixed(e)
        least = tl.minimum(least, e.to(tl.int32, bitcast=True))
    tl.debug_barrier()  # threads read what others wrote
    return tl.sum(weight, 0), tl.min(least, 0)


@triton.jit
def _bits(e_ptr, start, vocab, BLOCK: tl.constexpr):
    """Of positive floats, which they order; negative past the end of the row."""
    place = start + tl.arange(0, BLOCK)
    return tl.load(e_ptr + place, mask=place < vocab, other=-1.0).to(tl.int32, bitcast=True)


@triton.jit
def _fixed_of(bits):
    return _fixed(bits.to(tl.float32, bitcast=True))


@triton.jit
def _above(e_ptr, vocab, pivot, BLOCK: tl.constexpr):
    """Number and weight of what lies above."""
    number, weight = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        bits = _bits(e_ptr, start, vocab, BLOCK)
        number += (bits > pivot).to(tl.int32)
        weight += tl.where(bits > pivot, _fixed_of(bits), 0)
    return tl.sum(number, 0), tl.sum(weight, 0)


@triton.jit
def _gather(e_ptr, found_ptr, vocab, low, high, BLOCK: tl.constexpr):
    """The bits above low, up to high, of which there are at most BLOCK; _NONE fills up."""
    count = tl.full([], 0, tl.int32)
    tl.debug_barrier()  # threads may still read what an earlier call found
    for start in range(0, vocab, BLOCK):
        bits = _bits(e_ptr, start, vocab, BLOCK)
        inside = (bits > low) & (bits <= high)
        place = count + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(found_ptr + place, bits, mask=inside)
        count += tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()
    place = tl.arange(0, BLOCK)
    return tl.load(found_ptr + place, mask=place < count, other=_NONE)


@triton.jit
def _threshold(e_ptr, found_ptr, vocab, low, number_low, limit, by_weight, BLOCK: tl.constexpr):
    """The smallest bits, above low, such that what lies above them is less than limit in weight or
    number; with number and weight of what lies above them, and the number of what equals them.

    number_low: of what lies above low, which is not less than the limit.
    """
    high, number, weight = tl.full([], _ONE, tl.int32), number_low * 0, tl.full([], 0, tl.int64)
    while (high - low > 1) & (number_low - number > BLOCK):
        pivot = low + (high - low) // 2
        above, above_weight = _above(e_ptr, vocab, pivot, BLOCK)
        fits = tl.where(by_weight, above_weight, above.to(tl.int64)).to(tl.float64) < limit
        high, low = tl.where(fits, pivot, high), tl.where(fits, low, pivot)
        number, number_low = tl.where(fits, above, number), tl.where(fits, number_low, above)
        weight = tl.where(fits, above_weight, weight)
    if high - low > 1:
        bits = _gather(e_ptr, found_ptr, vocab, low, high, BLOCK)
        over, over_weight = number, weight
        while high - low > 1:
            pivot = low + (high - low) // 2
            is_above = bits > pivot
            above = over + tl.sum(is_above.to(tl.int32), 0)
            above_weight = over_weight + tl.sum(tl.where(is_above, _fixed_of(bits), 0), 0)
            fits = tl.where(by_weight, above_weight, above.to(tl.int64)).to(tl.float64) < limit
            # Nothing lies between the pivot and the values next to it.
            below_it = tl.max(tl.where(is_above, -1, bits), 0)
            above_it = tl.min(tl.where(is_above, bits, _MOST), 0)
            new_high = tl.where(fits, tl.maximum(below_it, low + 1), high)
            low = tl.where(fits, low, tl.minimum(above_it, high) - 1)
            high = new_high
            number, number_low = tl.where(fits, above, number), tl.where(fits, number_low, above)
            weight = tl.where(fits, above_weight, weight)
    return high, number, weight, number_low - number


@triton.jit
def _floor(e_ptr, found_ptr, vocab, least, weight_of_all, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """The bits of the least e that stays, and the weight of what stays."""
    floor, stays, low, count = least, weight_of_all, least - 1, vocab
    nucleus_of = weight_of_all
    if top_k < vocab:
        floor, number, weight, same = _threshold(
            e_ptr, found_ptr, vocab, low, count, top_k.to(tl.float64), False, BLOCK
        )
        nucleus_of = weight + (top_k - number) * _fixed_of(floor)
        stays = weight + same * _fixed_of(floor)
        low, count = floor - 1, number + same
    if top_p < 1.0:
        limit = top_p * nucleus_of.to(tl.float64)
        floor, number, weight, same = _threshold(
            e_ptr, found_ptr, vocab, low, count, limit, True, BLOCK
        )
        stays = weight + same * _fixed_of(floor)
    least_of_min_p = min_p.to(tl.int32, bitcast=True)
    if least_of_min_p > floor:
        floor = least_of_min_p
        number, stays = _above(e_ptr, vocab, floor - 1, BLOCK)
    return floor, stays


@triton.jit
def _find(e_ptr, vocab, floor, target, BLOCK: tl.constexpr):
    """The first place up to which the weight of what stays exceeds the target."""
    start, before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    token = vocab - 1
    while start < vocab:
        bits = _bits(e_ptr, start, vocab, BLOCK)
        weight = tl.where(bits >= floor, _fixed_of(bits), 0)
        after = before + tl.sum(weight, 0)
        if after > target:
            reached = before + tl.cumsum(weight, 0)
            place = start + tl.arange(0, BLOCK)
            token = tl.min(tl.where(reached > target, place, vocab - 1), 0)
            start = vocab
        start += BLOCK
        before = after
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


@triton.jit(do_not_specialize=["nodes"])
def _sample_rows_kernel(
    logits_ptr, e_ptr, found_ptr, words_ptr, slots_ptr, starts_ptr, depths_ptr, out_ptr,
    vocab, nodes, stride_logits, stride_e, stride_slot, stride_word,
    HAS_DEPTHS: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        found_ptr += row * BLOCK
        total, least = _write_e(logits_ptr, e_ptr, vocab, best, temperature, BLOCK)
        floor, total = _floor(e_ptr, found_ptr, vocab, least, total, top_k, top_p, min_p, BLOCK)
        target = (_uniform(seed, position, OFFSET) * total.to(tl.float64)).to(tl.int64)
        token = _find(e_ptr, vocab, floor, tl.minimum(target, total - 1), BLOCK)
    tl.store(out_ptr + row, token.to(tl.int64))


def sample_rows(
    logits_RV: Tensor, table: ChoiceTable, places: Places, stream: int, in_place: bool
) -> Tensor:
    rows, vocab = logits_RV.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows == 0:
        return out
    e_RV = logits_RV if in_place else torch.empty_like(logits_RV)
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab))
    found = torch.empty(rows, block, dtype=torch.int32, device=logits_RV.device)
    _sample_rows_kernel[(rows,)](
        logits_RV,
        e_RV,
        found,
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
        BLOCK=block,
        num_warps=max(1, min(_MAX_WARPS, block // 256)),
        # A product added in one rounding would not be what other devices give.
        enable_fp_fusion=False,
    )
    return out
