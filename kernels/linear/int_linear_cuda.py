"""Products with a weight of 4 bits in CUDA C++: codes stream through shared memory.

A kernel for few rows, whose warps share the depth, and one for dozens, whose warps share the
outputs. They add in the same order: a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.linear.quantised import INT4_CHUNK, IntWeight

FEW_ROWS = 16  # up to which the kernel for few is the faster, whatever the weight
STAGE = 128  # columns that a warp takes at a time

_SOURCES = Path(__file__).parents[1] / "cuda"
_SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_ZEROS = {None: 0, torch.uint8: 1, torch.float32: 2}


@dataclass(frozen=True)
class FewTile:
    """Shape of a block of the kernel for few rows: outputs (in sixteens), warps that share the
    depth, stages of a warp whose codes are on their way, and whether x is loaded a stage ahead."""

    sixteens: int
    warps: int
    slots: int
    ahead: bool = False
    kernel: ClassVar[str] = "int4_rows"

    def __str__(self) -> str:
        ahead = " ahead" * self.ahead
        return f"few {16 * self.sixteens} outs {self.warps} warps {self.slots} slots{ahead}"

    @property
    def defines(self) -> dict[str, int]:
        return {"AHEAD": int(self.ahead)}

    @property
    def outs(self) -> int:
        return 16 * self.sixteens

    def eights_of(self, num_rows: int) -> int:
        """Rows of a block, in eights."""
        return 1 if num_rows <= 8 else 2

    def blocks_of(self, num_outs: int) -> int:
        return -(-num_outs // self.outs)

    def shared_bytes(self, weight: IntWeight, eights: int) -> int:
        """A ring of codes, over which sums are written, and scales and zeros."""
        groups = weight.shape[1] // weight.group
        ring = 1024 * self.sixteens * self.slots * self.warps
        zero = 0 if weight.zero is None else weight.zero.element_size()
        sizes = (weight.scale.element_size(), zero)
        places = sum(-(-self.outs * groups * size // 16) * 16 for size in sizes)
        return max(ring + places, 4 * self.warps * 8 * eights * (self.outs + 4))


@dataclass(frozen=True)
class ManyTile:
    """Shape of a block of the kernel for dozens of rows: outputs of a warp (in sixteens), warps,
    ways (the warps of the kernel for few rows), blocks that share them, and stages in shared
    memory."""

    sixteens: int
    warps: int
    ways: int
    blocks: int
    slots: int
    kernel: ClassVar[str] = "int4_tile"

    def __str__(self) -> str:
        outs = f"{16 * self.sixteens} x {self.warps} outs"
        return f"many {outs} {self.ways} ways {self.blocks} blocks {self.slots} slots"

    @property
    def defines(self) -> dict[str, int]:
        return {"WAYS": self.ways, "CLUSTER": self.blocks}

    @property
    def outs(self) -> int:
        return 16 * self.sixteens * self.warps

    def eights_of(self, num_rows: int) -> int:
        """Rows of a block, in eights."""
        return 4 if num_rows <= 32 else 8

    def blocks_of(self, num_outs: int) -> int:
        return -(-num_outs // self.outs) * self.blocks

    def shared_bytes(self, weight: IntWeight, eights: int) -> int:
        """A ring of rows and codes, over which the last sums are written, and the others."""
        rows = 8 * eights
        ring = self.slots * (rows * (2 * STAGE + 32) + 64 * self.outs)
        sums = 4 * rows * (self.outs + 4)
        others = 1 if self.blocks == 1 else self.ways // self.blocks - 1
        return max(ring + others * sums, sums)


def ways_of(num_outs: int, columns: int) -> int:
    """In how many the depth is shared. They decide the order of a row's sum, and depend on the
    weight alone, never on the rows at hand."""
    return 16 if columns > 4096 or (columns >= 2048 and num_outs <= 4096) else 8


def few_tile(num_outs: int, columns: int, num_rows: int) -> FewTile:
    """As swept on an H200 at layers of an 8B and a 1B, groups of 128
    (benchmarks/kernels/int4_rows.py): of these the fastest, or up to 3% behind it. x is loaded
    ahead where a warp takes 4 stages or more and registers suffice: up to 8 rows, or 16 warps."""
    is_wide = num_outs >= 16384 and num_rows > 8
    ways = ways_of(num_outs, columns)
    ahead = columns >= 4 * STAGE * ways and (num_rows <= 8 or (ways == 16 and not is_wide))
    return FewTile(4 if is_wide else 2, ways, 2 if num_outs >= 4096 else 4, ahead)


def many_tile(num_outs: int, columns: int, num_rows: int) -> ManyTile:
    """As few_tile."""
    ways = ways_of(num_outs, columns)
    if num_outs >= 16384:
        return ManyTile(2, 4, ways, 1, 4) if num_rows <= 32 else ManyTile(2, 8, ways, 1, 3)
    if ways == 8:
        return ManyTile(2, 8, ways, 8, 3) if num_rows <= 32 else ManyTile(2, 4, ways, 4, 3)
    return ManyTile(1, 8, ways, 8, 3) if num_rows <= 32 else ManyTile(2, 4, ways, 8, 3)


def takes_many(weight: IntWeight) -> bool:
    """Whether the kernel for dozens of rows does: groups of whole stages, whole zeros, and a stage
    or more for each way."""
    is_whole = weight.zero is None or weight.zero.dtype == torch.uint8
    return (
        is_whole and weight.group % STAGE == 0 and weight.shape[1] >= ways_of(*weight.shape) * STAGE
    )


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
        and all(
            few_tile(*weight.shape, 8 * eights).shared_bytes(weight, eights) <= MOST_SHARED
            for eights in (1, 2)
        )
    )


def tile_for(weight: IntWeight, num_rows: int) -> FewTile | ManyTile:
    num_outs, columns = weight.shape
    is_deep = num_outs <= 4096 and columns > 8192
    if num_rows > (2 * FEW_ROWS if is_deep else FEW_ROWS) and takes_many(weight):
        return many_tile(*weight.shape, num_rows)
    return few_tile(*weight.shape, num_rows)


def int_linear(
    x: Tensor, weight: IntWeight, bias: Tensor | None, tile: FewTile | ManyTile | None = None
) -> Tensor:
    num_rows, columns = x.shape
    num_outs = weight.shape[0]
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    out = torch.empty((num_rows, num_outs), dtype=x.dtype, device=x.device)
    tile = tile or tile_for(weight, num_rows)
    eights = tile.eights_of(num_rows)
    shared = tile.shared_bytes(weight, eights)
    defines = {
        "TYPE": 0 if x.dtype == torch.bfloat16 else 1,
        "NT": tile.sixteens,
        "MT": eights,
        "WARPS": tile.warps,
        "SLOTS": tile.slots,
        "GROUP": weight.group,
        "SCALE": _SCALES[weight.scale.dtype],
        "ZERO": _ZEROS[None if weight.zero is None else weight.zero.dtype],
        "BIAS": int(bias is not None),
        **tile.defines,
    }
    source, device = _SOURCES / f"{tile.kernel}.cu", x.device.index or 0
    compiled(source, tile.kernel, tuple(defines.items()), shared, device).launch(
        (tile.blocks_of(num_outs), -(-num_rows // (8 * eights)), 1),
        32 * tile.warps,
        shared,
        (
            x,
            weight.codes,
            weight.scale,
            weight.zero,
            bias,
            out,
            num_rows,
            num_outs,
            columns,
            x.stride(0),
        ),
    )
    return out
