"""The products of experts in Triton.

A slot is one expert of one row: slot t * K + k is row t's k-th. Of few rows (tiles.py) there is a
program for each slot and tile of outputs, or for each expert where there are fewer; the one of an
expert's first slot takes all rows of the expert, and others end at once. So each chosen expert is
read once, and nothing is sorted before. Of more rows, slots are sorted by expert first
(order_triton.py), and a program takes a tile of rows of one expert.

Every slot's result has a place of its own and is computed in one order, so that no sum depends on
what runs first. Kernels start while the one ahead ends (programmatic dependent launch), and let the
next one start only behind their own wait: what a kernel reads of the one two before it is
complete.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.experts import order_triton
from specengine.kernels.experts.gated_triton import gated
from specengine.kernels.experts.packed import PackedExpertWeights
from specengine.kernels.experts.slots_triton import first_of, slots_of, tile_of
from specengine.kernels.experts.tiles import PART_ROWS, WHOLE, Tile, Tiles, are_few
from specengine.kernels.experts.types import Activation, Chosen, ExpertWeights
from specengine.kernels.sizes import cdiv, power_of_2

# Rows that go through together, for the memory that their parts take: more than a default chunk of
# prompts has (8,448 on an H200), with requests that decode beside it.
SLICE = 9216


@triton.jit
def _gate_up_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    weights_ptr,
    out_ptr,
    expert,
    slots,
    is_slot,
    n,
    hidden,
    inner,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Activations of some slots of one expert, at outputs n."""
    is_n = n < inner
    base = weight_ptr + expert.to(tl.int64) * (2 * inner) * hidden
    x_rows = x_ptr + (slots // CHOSEN).to(tl.int64)[:, None] * hidden
    gate_rows = base + n.to(tl.int64)[:, None] * hidden
    up_rows = gate_rows + inner.to(tl.int64) * hidden
    gate = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    up = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for k0 in range(0, hidden, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)[None, :]
        is_k = k < hidden
        x = tl.load(x_rows + k, mask=is_slot[:, None] & is_k, other=0.0)
        w = tl.load(gate_rows + k, mask=is_n[:, None] & is_k, other=0.0)
        gate = tl.dot(x, tl.trans(w), gate, input_precision="ieee")
        w_up = tl.load(up_rows + k, mask=is_n[:, None] & is_k, other=0.0)
        up = tl.dot(x, tl.trans(w_up), up, input_precision="ieee")
    if WEIGHS:
        weight = tl.load(weights_ptr + slots, mask=is_slot, other=0.0)[:, None]
        gate *= weight
        up *= weight
    if HAS_BIAS:
        bias = bias_ptr + expert.to(tl.int64) * (2 * inner) + n
        gate += tl.load(bias, mask=is_n, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + inner, mask=is_n, other=0.0).to(tl.float32)[None, :]
    activated = gated(gate, up, x_ptr.dtype.element_ty, CLAMPED, ALPHA, LIMIT)
    place = slots.to(tl.int64)[:, None] * inner + n[None, :]
    tl.store(out_ptr + place, activated, mask=is_slot[:, None] & is_n[None, :])


@triton.jit
def _down_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    weights_ptr,
    out_ptr,
    expert,
    slots,
    is_slot,
    n,
    rows,
    hidden,
    inner,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Weighed outputs of some slots of one expert, at outputs n: out[k, t, n]."""
    is_n = n < hidden
    x_rows = x_ptr + slots.to(tl.int64)[:, None] * inner
    w_rows = weight_ptr + (expert.to(tl.int64) * hidden + n.to(tl.int64))[:, None] * inner
    acc = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for k0 in range(0, inner, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)[None, :]
        is_k = k < inner
        x = tl.load(x_rows + k, mask=is_slot[:, None] & is_k, other=0.0)
        w = tl.load(w_rows + k, mask=is_n[:, None] & is_k, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if HAS_BIAS:
        bias = bias_ptr + expert.to(tl.int64) * hidden + n
        acc += tl.load(bias, mask=is_n, other=0.0).to(tl.float32)[None, :]
    if not WEIGHS:
        acc *= tl.load(weights_ptr + slots, mask=is_slot, other=0.0)[:, None]
    place = ((slots % CHOSEN).to(tl.int64) * rows + slots // CHOSEN)[:, None] * hidden + n[None, :]
    tl.store(out_ptr + place, acc, mask=is_slot[:, None] & is_n[None, :])


@triton.jit(do_not_specialize=["num_slots"])
def _few_gate_up_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    num_slots,
    hidden,
    inner,
    EVERY: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    offsets = tl.arange(0, BLOCK_S)
    ids = tl.load(ids_ptr + offsets, mask=offsets < num_slots, other=-1)
    expert = first_of(ids, offsets, tl.program_id(1), EVERY, ids_ptr)
    is_hit = ids == expert
    count = tl.sum(is_hit.to(tl.int32), axis=0)
    count = tl.where(expert < 0, 0, count)
    rank = tl.cumsum(is_hit.to(tl.int32), axis=0) - 1
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    for start in range(0, count, ROWS):
        slots = slots_of(is_hit, rank, offsets, start, ROWS)
        is_slot = start + tl.arange(0, ROWS) < count
        _gate_up_rows(
            x_ptr,
            weight_ptr,
            bias_ptr,
            weights_ptr,
            out_ptr,
            expert,
            slots,
            is_slot,
            n,
            hidden,
            inner,
            CHOSEN,
            HAS_BIAS,
            WEIGHS,
            CLAMPED,
            ALPHA,
            LIMIT,
            ROWS,
            OUTS,
            BLOCK_K,
        )


@triton.jit(do_not_specialize=["num_slots", "rows"])
def _few_down_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    num_slots,
    rows,
    hidden,
    inner,
    EVERY: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # The kernel that chose ran two before, and is complete.
    offsets = tl.arange(0, BLOCK_S)
    ids = tl.load(ids_ptr + offsets, mask=offsets < num_slots, other=-1)
    expert = first_of(ids, offsets, tl.program_id(1), EVERY, ids_ptr)
    is_hit = ids == expert
    count = tl.sum(is_hit.to(tl.int32), axis=0)
    count = tl.where(expert < 0, 0, count)
    rank = tl.cumsum(is_hit.to(tl.int32), axis=0) - 1
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, count, ROWS):
        slots = slots_of(is_hit, rank, offsets, start, ROWS)
        is_slot = start + tl.arange(0, ROWS) < count
        _down_rows(
            x_ptr,
            weight_ptr,
            bias_ptr,
            weights_ptr,
            out_ptr,
            expert,
            slots,
            is_slot,
            n,
            rows,
            hidden,
            inner,
            CHOSEN,
            HAS_BIAS,
            WEIGHS,
            ROWS,
            OUTS,
            BLOCK_K,
        )


@triton.jit(do_not_specialize=["num_tiles"])
def _many_gate_up_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    weights_ptr,
    out_ptr,
    num_tiles,
    num_experts,
    hidden,
    inner,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0) // tl.cdiv(inner, OUTS)
    expert, slots, is_slot = tile_of(order_ptr, tiles_ptr, tile, num_tiles, num_experts, ROWS)
    if expert < num_experts:
        n = tl.program_id(0) % tl.cdiv(inner, OUTS) * OUTS + tl.arange(0, OUTS)
        _gate_up_rows(
            x_ptr,
            weight_ptr,
            bias_ptr,
            weights_ptr,
            out_ptr,
            expert,
            slots,
            is_slot,
            n,
            hidden,
            inner,
            CHOSEN,
            HAS_BIAS,
            WEIGHS,
            CLAMPED,
            ALPHA,
            LIMIT,
            ROWS,
            OUTS,
            BLOCK_K,
        )


@triton.jit(do_not_specialize=["num_tiles", "rows"])
def _many_down_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    weights_ptr,
    out_ptr,
    num_tiles,
    num_experts,
    rows,
    hidden,
    inner,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0) // tl.cdiv(hidden, OUTS)
    expert, slots, is_slot = tile_of(order_ptr, tiles_ptr, tile, num_tiles, num_experts, ROWS)
    # What sorted the slots is complete: all programs of the first product waited for it.
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    if expert < num_experts:
        n = tl.program_id(0) % tl.cdiv(hidden, OUTS) * OUTS + tl.arange(0, OUTS)
        _down_rows(
            x_ptr,
            weight_ptr,
            bias_ptr,
            weights_ptr,
            out_ptr,
            expert,
            slots,
            is_slot,
            n,
            rows,
            hidden,
            inner,
            CHOSEN,
            HAS_BIAS,
            WEIGHS,
            ROWS,
            OUTS,
            BLOCK_K,
        )


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(
    parts_ptr,
    out_ptr,
    rows,
    hidden,
    CHOSEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = parts[0, t] + parts[1, t] + ... in float32."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(CHOSEN):
        part = tl.load(parts_ptr + (k * rows + row) * hidden + n, mask=n < hidden, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + row * hidden + n, total, mask=n < hidden)


@dataclass(frozen=True)
class _Call:
    """What all kernels of one call get."""

    x: Tensor
    chosen: Chosen
    weights: ExpertWeights
    tiles: Tiles

    @property
    def num_experts(self) -> int:
        return len(self.weights.gate_up)

    @property
    def inner(self) -> int:
        return self.weights.down.shape[2]

    def options(self, tile: Tile, bias: Tensor | None) -> dict[str, Any]:
        tile = tile.of_bytes(self.x.element_size())
        dependent = has_dependent_launch(self.x)
        return {
            "CHOSEN": self.chosen.ids_TK.shape[1],
            "HAS_BIAS": bias is not None,
            "WEIGHS": self.weights.weighs_input,
            "DEPENDENT": dependent,
            "ROWS": tile.rows,
            "OUTS": tile.outs,
            "BLOCK_K": tile.inputs,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            **({"launch_pdl": True} if dependent else {}),
        }

    @property
    def activation(self) -> dict[str, Any]:
        how: Activation = self.weights.activation
        return {"CLAMPED": how.name == "clamped", "ALPHA": how.alpha, "LIMIT": how.limit}


def experts(
    x: Tensor,
    chosen: Chosen,
    weights: ExpertWeights | PackedExpertWeights,
    tiles: Tiles | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """`experts.experts`; tiles: in place of those of the weights' table, which weights that are
    widened before do not need: given tiles are used."""
    x, (rows, hidden), count = x.contiguous(), x.shape, chosen.ids_TK.shape[1]
    if rows > SLICE:
        # Of equal size: none is so small that it leaves parts.
        size = -(-rows // -(-rows // SLICE))
        pieces = [slice(start, start + size) for start in range(0, rows, size)]
        cut = [Chosen(chosen.ids_TK[one], chosen.weights_TK[one]) for one in pieces]
        pairs = zip(pieces, cut, strict=True)
        return torch.cat([experts(x[one], part, weights, tiles) for one, part in pairs])
    leaves_parts = rows <= PART_ROWS
    if not rows:
        return x.new_empty(0, hidden)
    if isinstance(weights, PackedExpertWeights):
        from specengine.kernels.experts import packed_triton, widened_triton

        if tiles is None and widened_triton.takes(x, chosen, weights):
            parts = torch.empty(count, rows, hidden, dtype=x.dtype, device=x.device)
            widened_triton.run(x, chosen, weights, parts)
            return _sum(parts)
        tiles = tiles or packed_triton.tiles_of(weights, rows, count)
        parts = _room(x, count * (tiles.parts if are_few(rows, count) else 1), into)
        packed_triton.run(x, chosen, weights, parts, tiles)
    else:
        parts = _room(x, count, into)
        call = _Call(x, chosen, weights, tiles or WHOLE.tiles_of(rows, len(weights.gate_up), count))
        run = _run_few if are_few(rows, count) else _run_many
        run(call, parts)
    return parts if leaves_parts else _sum(parts)


def num_parts(rows: int, count: int, weights: ExpertWeights | PackedExpertWeights) -> int:
    """How many `experts` leaves to the norm behind, of rows of `count` experts each; 0: it gives
    the sum."""
    if not 0 < rows <= PART_ROWS:
        return 0
    if isinstance(weights, PackedExpertWeights) and are_few(rows, count):
        from specengine.kernels.experts import packed_triton

        return count * packed_triton.tiles_of(weights, rows, count).parts
    return count


def _room(x: Tensor, count: int, into: Tensor | None) -> Tensor:
    if into is not None:
        return into[:count]
    dtype = torch.float32 if len(x) <= PART_ROWS else x.dtype
    return torch.empty(count, *x.shape, dtype=dtype, device=x.device)


def _run_few(call: _Call, parts: Tensor) -> None:
    weights, ids = call.weights, call.chosen.ids_TK
    (rows, hidden), num_slots, inner = call.x.shape, ids.numel(), call.inner
    activated = torch.empty(num_slots, inner, dtype=call.x.dtype, device=call.x.device)
    every = num_slots > call.num_experts
    programs = min(num_slots, call.num_experts)
    slots = {"EVERY": every, "BLOCK_S": max(power_of_2(num_slots), 16)}
    tile = call.tiles.gate_up
    _few_gate_up_kernel[(cdiv(inner, tile.outs), programs)](
        call.x,
        weights.gate_up,
        call.x if weights.gate_up_bias is None else weights.gate_up_bias,
        ids,
        call.chosen.weights_TK,
        activated,
        num_slots,
        hidden,
        inner,
        **slots,
        **call.activation,
        **call.options(tile, weights.gate_up_bias),
    )
    tile = call.tiles.down
    _few_down_kernel[(cdiv(hidden, tile.outs), programs)](
        activated,
        weights.down,
        call.x if weights.down_bias is None else weights.down_bias,
        ids,
        call.chosen.weights_TK,
        parts,
        num_slots,
        rows,
        hidden,
        inner,
        **slots,
        **call.options(tile, weights.down_bias),
    )


def _run_many(call: _Call, parts: Tensor) -> None:
    weights, tiles = call.weights, call.tiles
    (rows, hidden), num_slots, inner = call.x.shape, call.chosen.ids_TK.numel(), call.inner
    activated = torch.empty(num_slots, inner, dtype=call.x.dtype, device=call.x.device)
    order = order_triton.order(call.chosen.ids_TK, call.num_experts, tiles.gate_up.rows)
    sorted_slots = order.slots, order.tiles, call.chosen.weights_TK
    num_tiles = order.max_tiles
    _many_gate_up_kernel[(num_tiles * cdiv(inner, tiles.gate_up.outs),)](
        call.x,
        weights.gate_up,
        call.x if weights.gate_up_bias is None else weights.gate_up_bias,
        *sorted_slots,
        activated,
        num_tiles,
        call.num_experts,
        hidden,
        inner,
        **call.activation,
        **call.options(tiles.gate_up, weights.gate_up_bias),
    )
    assert tiles.down.rows == tiles.gate_up.rows, "both products go by one order"
    _many_down_kernel[(num_tiles * cdiv(hidden, tiles.down.outs),)](
        activated,
        weights.down,
        call.x if weights.down_bias is None else weights.down_bias,
        *sorted_slots,
        parts,
        num_tiles,
        call.num_experts,
        rows,
        hidden,
        inner,
        **call.options(tiles.down, weights.down_bias),
    )


def _sum(parts: Tensor) -> Tensor:
    count, rows, hidden = parts.shape
    out = torch.empty(rows, hidden, dtype=parts.dtype, device=parts.device)
    dependent = has_dependent_launch(parts)
    block = min(power_of_2(hidden), 1024)
    _sum_kernel[(rows, cdiv(hidden, block))](
        parts,
        out,
        rows,
        hidden,
        CHOSEN=count,
        DEPENDENT=dependent,
        BLOCK=block,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out
