"""Which experts a row chooses by its logits, in Triton: one program, of one warp, a row.

Sums over a row depend on how its experts lie in the threads of a program. All programs that call
`choose_row` have one warp, so that they give the same bits.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

CHOOSING_WARPS = 1
_GONE = tl.constexpr(-(2**31))  # an order behind those of all numbers


@triton.jit
def _order_of(values):
    """int32 in the order of values, float32 that are no NaN. -0 counts as 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def choose_row(
    parts_ptr,
    bias_ptr,
    correction_ptr,
    ids_ptr,
    weights_ptr,
    row,
    rows,
    num_experts,
    group_size,
    scaling,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Read the row's logits from parts[p, t, e], and write its experts and their weights. Experts
    are a matrix, a group a row of it."""
    g, m = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_M)
    e = g[:, None] * group_size + m[None, :]
    is_e = (g[:, None] < GROUPS) & (m[None, :] < group_size)
    logits = tl.zeros((BLOCK_G, BLOCK_M), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * rows + row).to(tl.int64) * num_experts
        # Other multiprocessors may have written them in this launch.
        logits += tl.load(parts_ptr + place + e, mask=is_e, other=0.0, cache_modifier=".cg")
    if HAS_BIAS:
        logits += tl.load(bias_ptr + e, mask=is_e, other=0.0).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(is_e, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = powers / tl.sum(tl.sum(powers, axis=1), axis=0)
    ranks = scores
    if HAS_CORRECTION:
        ranks += tl.load(correction_ptr + e, mask=is_e, other=0.0)
    # A NaN would be chosen as an expert that does not exist.
    ranks = tl.where(is_e & (ranks == ranks), ranks, float("-inf"))
    if GROUPS > 1:
        best = tl.max(ranks, axis=1)
        rest = tl.where(m[None, :] == tl.argmax(ranks, axis=1)[:, None], float("-inf"), ranks)
        second = tl.max(rest, axis=1)
        values = best
        if GROUP_BEST == 2:
            values = tl.where(group_size > 1, best + second, best)
        values = tl.where(g < GROUPS, values, float("-inf"))
        is_chosen = tl.zeros((BLOCK_G,), dtype=tl.int32)
        for _ in tl.static_range(CHOSEN_GROUPS):
            group = tl.argmax(values, axis=0)
            is_chosen = tl.where(g == group, 1, is_chosen)
            values = tl.where(g == group, float("-inf"), values)
        ranks = tl.where(is_chosen[:, None] == 1, ranks, float("-inf"))
    SIZE: tl.constexpr = BLOCK_G * BLOCK_M
    score_bits = tl.reshape(scores, (SIZE,)).to(tl.int32, bitcast=True)
    places, slots = tl.arange(0, SIZE), tl.arange(0, BLOCK_C)
    # Behind every rank: no expert, or one that is chosen. A row of NaN has -inf alone for ranks,
    # and kernels that read the choice rely on different experts.
    orders = tl.where(tl.reshape(is_e, (SIZE,)), _order_of(tl.reshape(ranks, (SIZE,))), _GONE)
    ids = tl.zeros((BLOCK_C,), dtype=tl.int32)
    weights = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for slot in range(CHOSEN):
        # A warp finds the largest int32 of its threads in one instruction, and not that of int64.
        best_order = tl.max(orders, axis=0)
        found = tl.min(tl.where(orders == best_order, places, SIZE - 1), axis=0)
        expert = (found // BLOCK_M) * group_size + found % BLOCK_M
        ids = tl.where(slots == slot, tl.minimum(expert, num_experts - 1), ids)
        if HAS_CORRECTION:
            bits = tl.max(tl.where(places == found, score_bits, _GONE), axis=0)
            score = bits.to(tl.float32, bitcast=True)
        else:
            score = _value_of(best_order)
        weights = tl.where(slots == slot, score, weights)
        orders = tl.where(places == found, _GONE, orders)
    if NORMALISED:
        weights = weights / tl.sum(weights, axis=0)
    weights = weights * scaling
    out = row.to(tl.int64) * CHOSEN + slots
    tl.store(ids_ptr + out, ids, mask=slots < CHOSEN)
    tl.store(weights_ptr + out, weights, mask=slots < CHOSEN)
