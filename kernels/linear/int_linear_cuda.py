"""Products with a weight of 4 bits in CUDA C++: codes stream through shared memory.

A kernel for few rows, whose warps share the depth, and one for dozens, whose warps share the
outputs. They add in the same order: a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda.program import Argument, compiled
from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.linear.quantised import INT4_CHUNK, IntWeight

_SOURCES = Path(__file__).parents[1] / "cuda"
_STAGE = 128  # columns that a warp takes at a time
_SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_ZEROS = {None: 0, torch.uint8: 1, torch.float32: 2}
FEW_ROWS = 16


@dataclass(frozen=True)
class FewTile:
    """Shape of one block: outputs (in sixteens), warps that share the depth, and stages of a warp
    whose codes are on their way. The order of a row's sum follows from the warps: they depend on
    the weight alone, never on the rows at hand."""

    sixteens: int
    warps: int
    slots: int
    centre: int = 1

    def __str__(self) -> str:
        words = "" if self.centre else " raw"
        return f"few {16 * self.sixteens} outs {self.warps} warps {self.slots} slots{words}"

    def shared_bytes(self, weight: IntWeight, eights: int) -> int:
        """A ring of codes, over which sums are written, and scales and zeros."""
        outs, groups = 16 * self.sixteens, weight.shape[1] // weight.group
        ring = 1024 * self.sixteens * self.slots * self.warps
        zero = 0 if weight.zero is None else weight.zero.element_size()
        sizes = (weight.scale.element_size(), zero)
        places = sum(-(-outs * groups * size // 16) * 16 for size in sizes)
        return max(ring + places, 4 * self.warps * 8 * eights * (outs + 4))


@dataclass(frozen=True)
class ManyTile:
    """Shape of one block: outputs of a warp (in sixteens), warps, blocks that share the depth, and
    stages in shared memory."""

    sixteens: int
    warps: int
    cluster: int
    slots: int

    def __str__(self) -> str:
        outs = f"{16 * self.sixteens} x {self.warps} outs"
        return f"many {outs} {self.cluster} blocks {self.slots} slots"

    def shared_bytes(self, ways: int, eights: int) -> int:
        """A ring of rows and codes, over which the last sums are written, and the others."""
        rows, outs = 8 * eights, 16 * self.sixteens * self.warps
        ring = self.slots * (rows * (2 * _STAGE + 32) + 1024 * self.sixteens * self.warps)
        sums = 4 * rows * (outs + 4)
        mine = 1 if self.cluster == 1 else ways // self.cluster - 1
        return max(ring + mine * sums, sums)


def few_tile(num_outs: int, columns: int) -> FewTile:
    return FewTile(2, 8, 4)


def many_tile(num_outs: int, columns: int) -> ManyTile:
    return ManyTile(2, 8, 1 if num_outs >= 16384 else 8, 3)


def takes(x: Tensor, weight: IntWeight) -> bool:
    """Whether a kernel computes this product: half precision, 4 bits, tensors of whole 16 bytes,
    and no more scales than fit in shared memory."""
    zero_type = None if weight.zero is None else weight.zero.dtype
    tensors = [x, weight.codes, weight.scale, *([] if weight.zero is None else [weight.zero])]
    return (
        weight.bits == 4
        and weight.group % INT4_CHUNK == 0
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.scale.dtype in _SCALES
        and zero_type in _ZEROS
        and x.stride(0) % 8 == 0
        and all(one.data_ptr() % 16 == 0 and one.stride(-1) == 1 for one in tensors)
        and few_tile(*weight.shape).shared_bytes(weight, 2) <= MOST_SHARED
    )


def _takes_many(weight: IntWeight, ways: int) -> bool:
    """Groups of whole stages, whole zeros, and a stage for each way."""
    is_whole = weight.zero is None or weight.zero.dtype == torch.uint8
    return is_whole and weight.group % _STAGE == 0 and weight.shape[1] >= ways * _STAGE


def int_linear(
    x: Tensor, weight: IntWeight, bias: Tensor | None, tile: FewTile | ManyTile | None = None
) -> Tensor:
    num_rows, columns = x.shape
    num_outs = weight.shape[0]
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    out = torch.empty((num_rows, num_outs), dtype=x.dtype, device=x.device)
    few = few_tile(num_outs, columns)
    if tile is None:
        is_many = num_rows > FEW_ROWS and _takes_many(weight, few.warps)
        tile = many_tile(num_outs, columns) if is_many else few
    defines: tuple[tuple[str, int], ...] = (
        ("TYPE", 0 if x.dtype == torch.bfloat16 else 1),
        ("NT", tile.sixteens),
        ("WARPS", tile.warps),
        ("SLOTS", tile.slots),
        ("GROUP", weight.group),
        ("SCALE", _SCALES[weight.scale.dtype]),
        ("ZERO", _ZEROS[None if weight.zero is None else weight.zero.dtype]),
        ("BIAS", int(bias is not None)),
    )
    given = x, weight.codes, weight.scale, weight.zero, bias, out
    sizes = num_rows, num_outs, columns, x.stride(0)
    if isinstance(tile, FewTile):
        eights = 1 if num_rows <= 8 else 2
        shared = tile.shared_bytes(weight, eights)
        blocks = -(-num_outs // (16 * tile.sixteens))
        defines += (("MT", eights), ("CENTRE", tile.centre))
        _launch("int4_rows", tile, defines, blocks, eights, shared, (*given, *sizes))
    else:
        eights = 4 if num_rows <= 32 else 8
        shared = tile.shared_bytes(few.warps, eights)
        blocks = -(-num_outs // (16 * tile.sixteens * tile.warps)) * tile.cluster
        defines += (("MT", eights), ("WAYS", few.warps), ("CLUSTER", tile.cluster))
        _launch("int4_tile", tile, defines, blocks, eights, shared, (*given, *sizes))
    return out


def _launch(
    name: str,
    tile: FewTile | ManyTile,
    defines: tuple[tuple[str, int], ...],
    blocks: int,
    eights: int,
    shared: int,
    arguments: tuple[Argument, ...],
) -> None:
    x, num_rows = arguments[0], arguments[6]
    assert isinstance(x, Tensor)
    assert isinstance(num_rows, int)
    kernel = compiled(_SOURCES / f"{name}.cu", name, defines, shared, x.device.index or 0)
    grid = blocks, -(-num_rows // (8 * eights)), 1
    kernel.launch(grid, 32 * tile.warps, shared, arguments)
