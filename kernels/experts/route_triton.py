"""Routing in Triton: partial sums of the logits, then a program a row.

The router's product is cut into parts of the inputs, whose number depends on H alone, so that few
rows fill the card and a row's logits are summed in one order whatever stands beside it.

Few rows take one launch. Programs count themselves when their part is stored, and those that arrive
last choose. They may wait for each other: no more than the rows of a tile do, which leave room on
any card for the programs that they wait for. The choice depends on no order of arrival.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.experts.choose_row_triton import CHOOSING_WARPS, choose_row
from specengine.kernels.experts.types import Chosen, Router, Routing

_ROWS = 16
_EXPERTS = 16
_INPUTS = 128
_STEP = 512  # bytes of a step; the first weights are read before the kernel ahead has ended
_PART = 256  # inputs, at least
_MOST_PARTS = 8
MOST_TOGETHER = 32  # rows whose logits and choice share a launch; 0 gives each its own
_MOST_TILES = 16  # of rows, each with a count
_TURN = tl.constexpr(1 << 20)  # more programs than a tile of rows ever has


@triton.jit
def _logits_tile(
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
    _logits_tile(
        x_ptr, weight_ptr, parts_ptr, rows, hidden, num_experts, part_size, DEPENDENT, BLOCK_T,
        BLOCK_E, BLOCK_K,
    )  # fmt: skip


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
    """One row."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    choose_row(
        parts_ptr, bias_ptr, correction_ptr, ids_ptr, weights_ptr, tl.program_id(0), rows,
        num_experts, group_size, scaling, PARTS, HAS_BIAS, HAS_CORRECTION, SIGMOID, NORMALISED,
        CHOSEN, GROUPS, CHOSEN_GROUPS, GROUP_BEST, BLOCK_G, BLOCK_M, BLOCK_C,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "most_choosers"])
def _route_kernel(
    x_ptr,
    weight_ptr,
    parts_ptr,
    counts_ptr,
    bias_ptr,
    correction_ptr,
    ids_ptr,
    weights_ptr,
    rows,
    hidden,
    num_experts,
    part_size,
    group_size,
    scaling,
    most_choosers,
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
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Logits, as `_logits_kernel` computes them. Then the programs that arrive last of a tile of
    rows choose, as `_choose_kernel` does, a row each while there are enough programs."""
    _logits_tile(
        x_ptr, weight_ptr, parts_ptr, rows, hidden, num_experts, part_size, DEPENDENT, BLOCK_T,
        BLOCK_E, BLOCK_K,
    )  # fmt: skip
    tile = tl.program_id(0)
    total = tl.num_programs(1) * tl.num_programs(2)
    tile_rows = tl.minimum(rows - tile * BLOCK_T, BLOCK_T)
    choosers = tl.minimum(tl.minimum(tile_rows, most_choosers), total)
    # Every thread's stores must be out before the count says so.
    tl.debug_barrier()
    count = tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel", scope="gpu")
    arrived = count & (_TURN - 1)
    if arrived == total - 1:
        # The next launch counts from a multiple of _TURN, and those that wait see a larger count.
        tl.atomic_add(counts_ptr + tile, -total + _TURN, sem="relaxed", scope="gpu")
    first = arrived - (total - choosers)
    if first >= 0:
        seen = arrived + 1
        while seen < total:
            now = tl.atomic_add(counts_ptr + tile, 0, sem="acquire", scope="gpu")
            seen = now - (count - arrived)
        for more in range(0, tile_rows, choosers):
            if first + more < tile_rows:
                choose_row(
                    parts_ptr, bias_ptr, correction_ptr, ids_ptr, weights_ptr,
                    tile * BLOCK_T + first + more, rows, num_experts, group_size, scaling, PARTS,
                    HAS_BIAS, HAS_CORRECTION, SIGMOID, NORMALISED, CHOSEN, GROUPS, CHOSEN_GROUPS,
                    GROUP_BEST, BLOCK_G, BLOCK_M, BLOCK_C,
                )  # fmt: skip


def _counts_of(device: torch.device) -> Tensor:
    """int32 [tiles of rows], multiples of _TURN between launches: of the current stream, beside
    which others may run the same kernel. A captured graph keeps those of the stream that it was
    captured on."""
    is_cuda = device.type == "cuda"
    return _counts(device, torch.cuda.current_stream(device).cuda_stream if is_cuda else 0)


@cache
def _counts(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def _fits_one_launch(x: Tensor) -> bool:
    """Operands of 4 bytes would be more than the registers of one warp."""
    return len(x) <= min(MOST_TOGETHER, _MOST_TILES * _ROWS) and x.element_size() == 2


def route(x: Tensor, router: Router, routing: Routing) -> Chosen:
    x = x.contiguous()
    (rows, hidden), num_experts = x.shape, len(router.weight)
    ids = torch.empty(rows, routing.num_chosen, dtype=torch.int32, device=x.device)
    weights = torch.empty(ids.shape, dtype=torch.float32, device=x.device)
    if not rows:
        return Chosen(ids, weights)
    parts = min(max(hidden // _PART, 1), _MOST_PARTS)
    part_size = triton.cdiv(triton.cdiv(hidden, parts), _INPUTS) * _INPUTS
    parts = triton.cdiv(hidden, part_size)
    logits = torch.empty(parts, rows, num_experts, dtype=torch.float32, device=x.device)
    dependent = has_dependent_launch(x)
    launch: dict[str, Any] = {"DEPENDENT": dependent} | ({"launch_pdl": True} if dependent else {})
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(num_experts, _EXPERTS), parts)
    tile = {"BLOCK_T": _ROWS, "BLOCK_E": _EXPERTS, "BLOCK_K": _STEP // x.element_size()}
    extras = tuple(one if one is not None else logits for one in (router.bias, router.correction))
    group_size = num_experts // routing.num_groups
    choice = {
        "PARTS": parts,
        "HAS_BIAS": router.bias is not None,
        "HAS_CORRECTION": router.correction is not None,
        "SIGMOID": routing.scores == "sigmoid",
        "NORMALISED": routing.normalised,
        "CHOSEN": routing.num_chosen,
        "GROUPS": routing.num_groups,
        "CHOSEN_GROUPS": routing.num_chosen_groups,
        "GROUP_BEST": routing.group_best,
        "BLOCK_G": triton.next_power_of_2(routing.num_groups),
        "BLOCK_M": triton.next_power_of_2(group_size),
        "BLOCK_C": triton.next_power_of_2(routing.num_chosen),
        "num_warps": CHOOSING_WARPS,
    }
    product = x, router.weight, logits
    sizes = rows, hidden, num_experts, part_size
    if _fits_one_launch(x):
        # The interpreter runs a program at a time: one that waits would wait for ever.
        most_choosers = _ROWS if x.is_cuda else 1
        counts = _counts_of(x.device)
        _route_kernel[grid](
            *product, counts, *extras, ids, weights, *sizes, group_size, routing.scaling,
            most_choosers, **tile, **choice, **launch,
            num_stages=1 if part_size <= tile["BLOCK_K"] else 3,
        )  # fmt: skip
        return Chosen(ids, weights)
    _logits_kernel[grid](*product, *sizes, **tile, num_warps=2, **launch)
    _choose_kernel[(rows,)](
        logits, *extras, ids, weights, rows, num_experts, group_size, routing.scaling,
        **choice, **launch,
    )  # fmt: skip
    return Chosen(ids, weights)
