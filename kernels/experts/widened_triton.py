"""Experts of packed weights for the many rows of long prompts: the weights are widened once, and
PyTorch's grouped product multiplies them.

Where each expert has hundreds of rows, widening once takes less than widening for each tile of
rows. Rows are sorted by expert between the two products; what follows each product is one kernel.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from specengine.kernels.dispatch import has_warpgroups
from specengine.kernels.experts import order_triton
from specengine.kernels.experts.gated_triton import gated
from specengine.kernels.experts.packed import PackedExpertWeights
from specengine.kernels.experts.tiles import PART_ROWS
from specengine.kernels.experts.types import Chosen
from specengine.kernels.sizes import cdiv, power_of_2

_TILE = 128  # rows; what sorts the slots makes tiles, which are not read here
_LARGEST_BLOCK = 1024


@triton.jit
def _activate_kernel(
    sums_ptr,
    bias_ptr,
    ids_ptr,
    order_ptr,
    out_ptr,
    inner,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < inner
    at = sums_ptr + place * 2 * inner + n
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        expert = tl.load(ids_ptr + tl.load(order_ptr + place)).to(tl.int64)
        bias = bias_ptr + expert * 2 * inner + n
        gate += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias + inner, mask=mask, other=0.0).to(tl.float32)
    made = gated(gate, up, out_ptr.dtype.element_ty, CLAMPED, ALPHA, LIMIT)
    tl.store(out_ptr + place * inner + n, made, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _weigh_kernel(
    sums_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    order_ptr,
    parts_ptr,
    rows,
    hidden,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """To the places that experts_triton.py says: parts[k, t, n]."""
    place = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < hidden
    slot = tl.load(order_ptr + place)
    sums = tl.load(sums_ptr + place * hidden + n, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = bias_ptr + tl.load(ids_ptr + slot).to(tl.int64) * hidden + n
        sums += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
    sums *= tl.load(weights_ptr + slot)
    to = (slot % CHOSEN).to(tl.int64) * rows + slot // CHOSEN
    tl.store(parts_ptr + to * hidden + n, sums, mask=mask)


def takes(x: Tensor, chosen: Chosen, weights: PackedExpertWeights) -> bool:
    """By the shapes alone. x: [T, H]. So many rows leave no parts."""
    wide = weights.down.format.wide
    if wide is None or x.dtype != torch.bfloat16 or weights.weighs_input:
        return False
    if len(x) <= PART_ROWS or (weights.gate_up.input or weights.down.input) is not None:
        return False
    is_aligned = x.shape[1] % 8 == 0 and weights.inner % 8 == 0  # 16 bytes, as PyTorch asks
    mean = chosen.ids_TK.numel() / weights.num_experts
    return is_aligned and mean >= wide.least_rows and has_warpgroups(x)


def run(x: Tensor, chosen: Chosen, weights: PackedExpertWeights, parts: Tensor) -> None:
    """Fills parts [K, T, H] with what each chosen expert gives of each row, as experts.experts
    says. x: [T, H], contiguous."""
    wide = weights.down.format.wide
    assert wide is not None
    num_slots, num_chosen = chosen.ids_TK.numel(), chosen.ids_TK.shape[1]
    (rows, hidden), inner, how = x.shape, weights.inner, weights.activation
    order = order_triton.order(chosen.ids_TK, weights.num_experts, _TILE)
    given = x.index_select(0, order.slots // num_chosen)
    dense = wide.widen(weights.gate_up, x.dtype)
    sums = F.grouped_mm(given, dense.transpose(1, 2), offs=order.stops)
    del dense, given
    activated = x.new_empty(num_slots, inner)
    block = min(power_of_2(inner), _LARGEST_BLOCK)
    bias = weights.gate_up_bias
    _activate_kernel[(num_slots, cdiv(inner, block))](
        sums,
        sums if bias is None else bias,
        chosen.ids_TK,
        order.slots,
        activated,
        inner,
        HAS_BIAS=bias is not None,
        CLAMPED=how.name == "clamped",
        ALPHA=how.alpha,
        LIMIT=how.limit,
        BLOCK=block,
    )
    del sums
    dense = wide.widen(weights.down, x.dtype)
    sums = F.grouped_mm(activated, dense.transpose(1, 2), offs=order.stops)
    block = min(power_of_2(hidden), _LARGEST_BLOCK)
    bias = weights.down_bias
    _weigh_kernel[(num_slots, cdiv(hidden, block))](
        sums,
        sums if bias is None else bias,
        chosen.ids_TK,
        chosen.weights_TK,
        order.slots,
        parts,
        rows,
        hidden,
        CHOSEN=num_chosen,
        HAS_BIAS=bias is not None,
        BLOCK=block,
    )
