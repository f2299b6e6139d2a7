"""The products of experts in 8 and 4 bits, in Triton. Slots, their order and the places of results
are those of experts_triton.py; a weight's tile is widened in registers, its rows are the rows of
the processor's product, so that 64 of them fill it whatever few slots there are. Of very many rows
some formats' weights are widened before (widened_triton.py).

A format's `sums` is called with: inputs [., columns] and the rows of these to take, which of them
exist; the format's four tensors; the expert; which of its num_outs rows, and which of these exist;
columns; which part of the sum, of how many; the format's constants, and the sizes of the tile. It
returns float32 [outs, rows].
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
from specengine.kernels.experts.packed import Operands, PackedExperts, PackedExpertWeights
from specengine.kernels.experts.slots_triton import first_of, slots_of, tile_of
from specengine.kernels.experts.tiles import Tile, Tiles, are_few
from specengine.kernels.experts.types import Chosen
from specengine.kernels.linear.fp8_linear_triton import quantise_rows
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.linear.rounded import found_beside
from specengine.kernels.sizes import cdiv, power_of_2

# Inputs with a scale a group are rounded where they are multiplied, without a kernel, in tiles of
# so few rows that it takes hardly any time, though every tile of outputs does it.
ROUNDS_INSIDE = True
_ROUNDED_ROWS = 16


@triton.jit
def _gate_up_tile(
    x_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    fourth_ptr,
    bias_ptr,
    weights_ptr,
    out_ptr,
    expert,
    slots,
    is_slot,
    n,
    hidden,
    inner,
    SUMS: tl.constexpr,
    FORM: tl.constexpr,
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
    """Activations of some slots of one expert at outputs n, the first of which is n."""
    # Eight rows of gate and of up take turns, so that both lie in one thread's registers.
    turn = tl.arange(0, 2 * OUTS)
    at = n + turn // 16 * 8 + turn % 8
    sums = SUMS(
        x_ptr,
        slots // CHOSEN,
        is_slot,
        first_ptr,
        second_ptr,
        third_ptr,
        fourth_ptr,
        expert,
        at + turn // 8 % 2 * inner,
        at < inner,
        2 * inner,
        hidden,
        0,
        1,
        FORM,
        2 * OUTS,
        ROWS,
        BLOCK_K,
    )
    gate, up = tl.split(tl.permute(tl.reshape(sums, (OUTS // 8, 2, 8, ROWS)), (0, 2, 3, 1)))
    gate, up = tl.reshape(gate, (OUTS, ROWS)), tl.reshape(up, (OUTS, ROWS))
    at = n + tl.arange(0, OUTS)
    is_out = at < inner
    if WEIGHS:
        weight = tl.load(weights_ptr + slots, mask=is_slot, other=0.0)[None, :]
        gate *= weight
        up *= weight
    if HAS_BIAS:
        bias = bias_ptr + expert.to(tl.int64) * (2 * inner) + at
        gate += tl.load(bias, mask=is_out, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + inner, mask=is_out, other=0.0).to(tl.float32)[:, None]
    activated = gated(gate, up, out_ptr.dtype.element_ty, CLAMPED, ALPHA, LIMIT)
    place = slots.to(tl.int64)[None, :] * inner + at[:, None]
    tl.store(out_ptr + place, activated, mask=is_out[:, None] & is_slot[None, :])


@triton.jit
def _down_tile(
    x_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    fourth_ptr,
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
    part,
    PARTS: tl.constexpr,
    SUMS: tl.constexpr,
    FORM: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Weighed outputs of some slots of one expert, the first of which is n, or a part of their
    sums: out[k * PARTS + part, t, n]."""
    at = n + tl.arange(0, OUTS)
    is_out = at < hidden
    sums = SUMS(
        x_ptr,
        slots,
        is_slot,
        first_ptr,
        second_ptr,
        third_ptr,
        fourth_ptr,
        expert,
        at,
        is_out,
        hidden,
        inner,
        part,
        PARTS,
        FORM,
        OUTS,
        ROWS,
        BLOCK_K,
    )
    if HAS_BIAS:
        bias = bias_ptr + expert.to(tl.int64) * hidden + at
        more = tl.load(bias, mask=is_out, other=0.0).to(tl.float32)
        sums += tl.where(part == 0, more, 0.0)[:, None]
    if not WEIGHS:
        sums *= tl.load(weights_ptr + slots, mask=is_slot, other=0.0)[None, :]
    place = (slots % CHOSEN * PARTS + part).to(tl.int64) * rows + slots // CHOSEN
    mask = is_out[:, None] & is_slot[None, :]
    tl.store(out_ptr + place[None, :] * hidden + at[:, None], sums, mask=mask)


@triton.jit(do_not_specialize=["num_slots", "rows"])
def _few_kernel(
    x_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    fourth_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    num_slots,
    rows,
    hidden,
    inner,
    IS_DOWN: tl.constexpr,
    SUMS: tl.constexpr,
    FORM: tl.constexpr,
    EVERY: tl.constexpr,
    PARTS: tl.constexpr,
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
    TURNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Of the second product, the kernel that chose ran two before, and is complete.
    if DEPENDENT and not IS_DOWN:
        gdc_wait()
        gdc_launch_dependents()
    offsets = tl.arange(0, BLOCK_S)
    ids = tl.load(ids_ptr + offsets, mask=offsets < num_slots, other=-1)
    expert = first_of(ids, offsets, tl.program_id(1), EVERY, ids_ptr)
    is_hit = ids == expert
    count = tl.sum(is_hit.to(tl.int32), axis=0)
    count = tl.where(expert < 0, 0, count)
    rank = tl.cumsum(is_hit.to(tl.int32), axis=0) - 1
    begin = tl.program_id(0) * (OUTS * TURNS)
    end = tl.minimum(begin + OUTS * TURNS, hidden if IS_DOWN else inner)
    if DEPENDENT and IS_DOWN:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, count, ROWS):
        slots = slots_of(is_hit, rank, offsets, start, ROWS)
        is_slot = start + tl.arange(0, ROWS) < count
        for n in range(begin, end, OUTS):
            if IS_DOWN:
                _down_tile(
                    x_ptr,
                    first_ptr,
                    second_ptr,
                    third_ptr,
                    fourth_ptr,
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
                    tl.program_id(2),
                    PARTS,
                    SUMS,
                    FORM,
                    CHOSEN,
                    HAS_BIAS,
                    WEIGHS,
                    ROWS,
                    OUTS,
                    BLOCK_K,
                )
            else:
                _gate_up_tile(
                    x_ptr,
                    first_ptr,
                    second_ptr,
                    third_ptr,
                    fourth_ptr,
                    bias_ptr,
                    weights_ptr,
                    out_ptr,
                    expert,
                    slots,
                    is_slot,
                    n,
                    hidden,
                    inner,
                    SUMS,
                    FORM,
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


@triton.jit
def _sorted_tile(
    x_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    fourth_ptr,
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
    IS_DOWN: tl.constexpr,
    SUMS: tl.constexpr,
    FORM: tl.constexpr,
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
    if IS_DOWN:
        _down_tile(
            x_ptr,
            first_ptr,
            second_ptr,
            third_ptr,
            fourth_ptr,
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
            tl.program_id(2),
            1,
            SUMS,
            FORM,
            CHOSEN,
            HAS_BIAS,
            WEIGHS,
            ROWS,
            OUTS,
            BLOCK_K,
        )
    else:
        _gate_up_tile(
            x_ptr,
            first_ptr,
            second_ptr,
            third_ptr,
            fourth_ptr,
            bias_ptr,
            weights_ptr,
            out_ptr,
            expert,
            slots,
            is_slot,
            n,
            hidden,
            inner,
            SUMS,
            FORM,
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
def _many_kernel(
    x_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    fourth_ptr,
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
    IS_DOWN: tl.constexpr,
    SUMS: tl.constexpr,
    FORM: tl.constexpr,
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
    if DEPENDENT and not IS_DOWN:
        gdc_wait()
        gdc_launch_dependents()
    # The last tile of an expert mostly is not full: where half of one holds it, that is taken.
    HALF: tl.constexpr = ROWS // 2 if ROWS >= 64 else 0
    blocks = tl.cdiv(hidden, OUTS) if IS_DOWN else tl.cdiv(inner, OUTS)
    tile = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * OUTS
    expert, slots, is_slot = tile_of(order_ptr, tiles_ptr, tile, num_tiles, num_experts, ROWS)
    # What sorted the slots is complete: all programs of the first product waited for it.
    if DEPENDENT and IS_DOWN:
        gdc_wait()
        gdc_launch_dependents()
    if expert < num_experts:
        if HALF == 0 or tl.sum(is_slot.to(tl.int32), axis=0) > HALF:
            _sorted_tile(
                x_ptr,
                first_ptr,
                second_ptr,
                third_ptr,
                fourth_ptr,
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
                IS_DOWN,
                SUMS,
                FORM,
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
        else:
            same, half, is_half = tile_of(order_ptr, tiles_ptr, tile, num_tiles, num_experts, HALF)
            _sorted_tile(
                x_ptr,
                first_ptr,
                second_ptr,
                third_ptr,
                fourth_ptr,
                bias_ptr,
                weights_ptr,
                out_ptr,
                same,
                half,
                is_half,
                n,
                rows,
                hidden,
                inner,
                IS_DOWN,
                SUMS,
                FORM,
                CHOSEN,
                HAS_BIAS,
                WEIGHS,
                CLAMPED,
                ALPHA,
                LIMIT,
                HALF,
                OUTS,
                BLOCK_K,
            )


@dataclass(frozen=True)
class _Product:
    """One of the two products of a call."""

    x: Tensor  # [R, columns], of the activations' type
    matrix: PackedExperts
    bias: Tensor | None
    tile: Tile
    weights: PackedExpertWeights
    chosen: Chosen

    def inputs(self) -> tuple[Tensor, Tensor | None]:
        """What is multiplied, and its scales where it is rounded already."""
        form = self.matrix.input
        if form is None:
            return self.x, None
        if kept := found_beside(self.x, form):
            return kept
        if ROUNDS_INSIDE and self.tile.rows <= _ROUNDED_ROWS and self._rounds_by_step(form):
            return self.x, None
        return quantise_rows(self.x, form)

    def _rounds_by_step(self, form: Fp8Input) -> bool:
        """Whether a step of the product takes just the columns that share a scale. Not of float32
        on a card: that it is widened again after rounding has not run there."""
        if form.scale is not None or form.group is None:
            return False
        if self.x.is_cuda and self.x.dtype == torch.float32:
            return False
        return (
            self._step(self.matrix.format.operands(self.matrix, self.x.dtype, None)) == form.group
        )

    def _step(self, operands: Operands) -> int:
        columns = self.tile.of_bytes(self.x.element_size()).inputs
        return _step(columns, operands.most_columns, operands.least_columns)

    def arguments(self, given: Tensor, scale: Tensor | None) -> tuple[list[Tensor], dict[str, Any]]:
        """Tensors from the inputs to the bias, and constants."""
        operands = self.matrix.format.operands(self.matrix, self.x.dtype, scale)
        how, dependent = self.weights.activation, has_dependent_launch(self.x)
        bias = self.x if self.bias is None else self.bias
        constants = {
            "SUMS": self.matrix.format.sums,
            "FORM": operands.form,
            "CHOSEN": self.chosen.ids_TK.shape[1],
            "HAS_BIAS": self.bias is not None,
            "WEIGHS": self.weights.weighs_input,
            "CLAMPED": how.name == "clamped",
            "ALPHA": how.alpha,
            "LIMIT": how.limit,
            "DEPENDENT": dependent,
            "ROWS": self.tile.rows,
            "OUTS": self.tile.outs,
            "BLOCK_K": self._step(operands),
            "num_warps": self.tile.warps,
            "num_stages": self.tile.stages,
            **({"maxnreg": self.tile.registers} if self.tile.registers else {}),
            **({"launch_pdl": True} if dependent else {}),
        }
        return [given, *operands.tensors, bias], constants


def _step(columns: int, most: int, least: int) -> int:
    """A power of 2, at most so many columns as the format allows, but at least its least."""
    return max(min(columns, power_of_2(most)), least)


def tiles_of(weights: PackedExpertWeights, num_rows: int, num_chosen: int) -> Tiles:
    """By the shapes alone, so that launches are the same whatever is chosen."""
    return weights.down.format.tiles.tiles_of(num_rows, weights.num_experts, num_chosen)


def run(
    x: Tensor,
    chosen: Chosen,
    weights: PackedExpertWeights,
    parts: Tensor,
    tiles: Tiles,
) -> None:
    """Fills parts [K * tiles.parts, T, H] with what each chosen expert gives of each row, as
    experts.experts says. x: [T, H], contiguous."""
    count, inner = chosen.ids_TK.numel(), weights.inner
    activated = torch.empty(count, inner, dtype=x.dtype, device=x.device)
    launch = _run_few if are_few(*chosen.ids_TK.shape) else _run_many
    tiles = tiles.held(x.element_size())
    launch(
        x,
        chosen,
        _Product(x, weights.gate_up, weights.gate_up_bias, tiles.gate_up, weights, chosen),
        _Product(activated, weights.down, weights.down_bias, tiles.down, weights, chosen),
        parts,
    )


def _run_few(x: Tensor, chosen: Chosen, gate_up: _Product, down: _Product, parts: Tensor) -> None:
    num_slots, num_experts = chosen.ids_TK.numel(), gate_up.weights.num_experts
    (rows, hidden), inner = x.shape, gate_up.weights.inner
    for product, out, width in ((gate_up, down.x, inner), (down, parts, hidden)):
        tensors, constants = product.arguments(*product.inputs())
        num_parts = len(parts) // chosen.ids_TK.shape[1] if product is down else 1
        programs = min(num_slots, num_experts)
        grid = cdiv(width, product.tile.outs * product.tile.turns), programs, num_parts
        _few_kernel[grid](
            *tensors,
            chosen.ids_TK,
            chosen.weights_TK,
            out,
            num_slots,
            rows,
            hidden,
            inner,
            IS_DOWN=product is down,
            EVERY=num_slots > num_experts,
            PARTS=num_parts,
            TURNS=product.tile.turns,
            BLOCK_S=max(power_of_2(num_slots), 16),
            **constants,
        )


def _run_many(x: Tensor, chosen: Chosen, gate_up: _Product, down: _Product, parts: Tensor) -> None:
    num_experts, inner = gate_up.weights.num_experts, gate_up.weights.inner
    rows, hidden = x.shape
    order = order_triton.order(chosen.ids_TK, num_experts, gate_up.tile.rows)
    assert down.tile.rows == gate_up.tile.rows, "both products go by one order"
    for product, out, width in ((gate_up, down.x, inner), (down, parts, hidden)):
        tensors, constants = product.arguments(*product.inputs())
        _many_kernel[(order.max_tiles * cdiv(width, product.tile.outs),)](
            *tensors,
            order.slots,
            order.tiles,
            chosen.weights_TK,
            out,
            order.max_tiles,
            num_experts,
            rows,
            hidden,
            inner,
            IS_DOWN=product is down,
            **constants,
        )
