"""Routing in Triton: partial sums of the logits, then a program a row.

The router's product is cut into parts of the inputs, whose number depends on H alone, so that few
rows fill the card and a row's logits are summed in one order whatever other rows there are.
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

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.experts.types import Chosen, Router, Routing
from specengine.kernels.sizes import cdiv, power_of_2

_INPUTS = 128
_STEP = 512  # bytes of a step; the first weights are read before the kernel ahead has ended
_PART = 256  # inputs, at least
_MOST_PARTS = 8
# Of a thread that chooses. With this limit the compiler has the loads of all parts of 512 experts
# on their way before the first addition; else it spares registers, and a row waits for memory four
# times.
_REGISTERS = 168


@dataclass(frozen=True)
class LogitsTile:
    """Rows and experts of a program of logits, and its warps. All have the same bits: 16 rows are
    those of the product of two warps, which four take only below 64 rows."""

    rows: int = 16
    experts: int = 16
    warps: int = 2


_LOGITS = LogitsTile()
# Of dozens of rows, where experts are so many that all multiprocessors have programs; as measured
# on an H200 (benchmarks/kernels/routing.py).
_LOGITS_OF_DOZENS = LogitsTile(32, 32, 2)
_DOZENS, _PROGRAMS = 48, 256
# Of many rows of 16 bits, which programs of few experts would read again and again; of float32 it
# would spill.
_LOGITS_OF_MANY = LogitsTile(32, 64, 8)
_MANY = 512  # rows
_GONE = tl.constexpr(-(2**31))  # an order behind those of all numbers


@triton.jit(do_not_specialize=["rows"])
def _logits_kernel(
    x_ptr,
    weight_ptr,
    parts_ptr,
    rows,
    hidden,
    num_experts,
    part_size,
    DEPENDENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """parts[p, t, e]: the product over the p-th part of the inputs."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    is_t, is_e = t < rows, e < num_experts
    acc = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    end = tl.minimum(part * part_size + part_size, hidden)
    k = part * part_size + tl.arange(0, BLOCK_K)
    x_rows = x_ptr + t[:, None].to(tl.int64) * hidden
    w_rows = weight_ptr + e[:, None] * hidden
    w = tl.load(w_rows + k[None, :], mask=is_e[:, None] & (k < end)[None, :], other=0.0)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    for _ in range(0, part_size, BLOCK_K):
        x = tl.load(x_rows + k[None, :], mask=is_t[:, None] & (k < end)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        k += BLOCK_K
        w = tl.load(w_rows + k[None, :], mask=is_e[:, None] & (k < end)[None, :], other=0.0)
    place = (part * rows + t[:, None]).to(tl.int64) * num_experts + e[None, :]
    tl.store(parts_ptr + place, acc, mask=is_t[:, None] & is_e[None, :])


@triton.jit
def _order_of(values):
    """int32 in the order of values, float32 that are no NaN. -0 counts as 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def _choose_kernel(
    parts_ptr,
    bias_ptr,
    correction_ptr,
    ids_ptr,
    weights_ptr,
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
    DEPENDENT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One row. Experts are a matrix, a group a row of it."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    g, m = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_M)
    e = g[:, None] * group_size + m[None, :]
    is_e = (g[:, None] < GROUPS) & (m[None, :] < group_size)
    logits = tl.zeros((BLOCK_G, BLOCK_M), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * rows + row).to(tl.int64) * num_experts
        # Each is read once: the cache of the multiprocessor need not keep it.
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


def route(x: Tensor, router: Router, routing: Routing, tile: LogitsTile | None = None) -> Chosen:
    """route.route; tile: in place of the one in force."""
    x, (rows, hidden), num_experts = x.contiguous(), x.shape, len(router.weight)
    ids = torch.empty(rows, routing.num_chosen, dtype=torch.int32, device=x.device)
    weights = torch.empty(ids.shape, dtype=torch.float32, device=x.device)
    if not rows:
        return Chosen(ids, weights)
    parts = min(max(hidden // _PART, 1), _MOST_PARTS)
    part_size = cdiv(cdiv(hidden, parts), _INPUTS) * _INPUTS
    parts = cdiv(hidden, part_size)
    logits = torch.empty(parts, rows, num_experts, dtype=torch.float32, device=x.device)
    tile = tile or _logits_tile(x, num_experts, parts)
    dependent = has_dependent_launch(x)
    launch = {"launch_pdl": True} if dependent else {}
    grid = (cdiv(rows, tile.rows), cdiv(num_experts, tile.experts), parts)
    _logits_kernel[grid](
        x,
        router.weight,
        logits,
        rows,
        hidden,
        num_experts,
        part_size,
        DEPENDENT=dependent,
        BLOCK_T=tile.rows,
        BLOCK_E=tile.experts,
        BLOCK_K=_STEP // x.element_size(),
        num_warps=tile.warps,
        **launch,
    )
    group_size = num_experts // routing.num_groups
    _choose_kernel[(rows,)](
        logits,
        router.bias if router.bias is not None else logits,
        router.correction if router.correction is not None else logits,
        ids,
        weights,
        rows,
        num_experts,
        group_size,
        routing.scaling,
        PARTS=parts,
        HAS_BIAS=router.bias is not None,
        HAS_CORRECTION=router.correction is not None,
        SIGMOID=routing.scores == "sigmoid",
        NORMALISED=routing.normalised,
        CHOSEN=routing.num_chosen,
        GROUPS=routing.num_groups,
        CHOSEN_GROUPS=routing.num_chosen_groups,
        GROUP_BEST=routing.group_best,
        DEPENDENT=dependent,
        BLOCK_G=power_of_2(routing.num_groups),
        BLOCK_M=power_of_2(group_size),
        BLOCK_C=power_of_2(routing.num_chosen),
        num_warps=1,
        maxnreg=_REGISTERS,
        **launch,
    )
    return Chosen(ids, weights)


def _logits_tile(x: Tensor, num_experts: int, parts: int) -> LogitsTile:
    """By the shapes alone."""
    rows, dozens = len(x), _LOGITS_OF_DOZENS
    if rows >= _MANY and x.element_size() == 2:
        return _LOGITS_OF_MANY
    programs = cdiv(rows, dozens.rows) * cdiv(num_experts, dozens.experts) * parts
    if rows >= _DOZENS and programs >= _PROGRAMS and x.element_size() == 2:
        return dozens
    return _LOGITS
