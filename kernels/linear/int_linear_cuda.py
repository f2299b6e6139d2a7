"""Products with a weight of 4 bits in CUDA C++, for few rows: codes stream through shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.linear.quantised import INT4_CHUNK, IntWeight

_SOURCE = Path(__file__).parents[1] / "cuda" / "int4_rows.cu"
_STAGE = 128  # columns that a warp takes at a time
_SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_ZEROS = {None: 0, torch.uint8: 1, torch.float32: 2}


@dataclass(frozen=True)
class Tile:
    """Shape of one block: outputs (in sixteens), warps that share the depth, and stages of a warp
    whose codes are on their way. The order of a row's sum follows from the warps: they depend on the
    weight alone, never on the rows at hand."""

    sixteens: int
    warps: int
    slots: int
    centre: int = 1

    def __str__(self) -> str:
        words = "" if self.centre else " raw"
        return f"{16 * self.sixteens} outs {self.warps} warps {self.slots} slots{words}"


def tile_for(num_outs: int, columns: int, num_rows: int) -> Tile:
    warps = 16 if columns > 8192 else 8
    return Tile(2, warps, 4)


def shared_bytes(weight: IntWeight, tile: Tile, num_rows: int) -> int:
    """That a block takes: a ring of codes, over which sums are written, and scales and zeros."""
    outs, groups = 16 * tile.sixteens, weight.shape[1] // weight.group
    ring = 1024 * tile.sixteens * tile.slots * tile.warps
    zero = 0 if weight.zero is None else weight.zero.element_size()
    places = sum(-(-outs * groups * size // 16) * 16 for size in (weight.scale.element_size(), zero))
    return max(ring + places, 4 * tile.warps * 8 * _eights(num_rows) * (outs + 4))


def _eights(num_rows: int) -> int:
    return 1 if num_rows <= 8 else 2


def takes(x: Tensor, weight: IntWeight) -> bool:
    """Whether the kernel computes this product: half precision, 4 bits, tensors of whole 16 bytes,
    and no more scales than fit in shared memory."""
    zero_type = None if weight.zero is None else weight.zero.dtype
    tensors = [x, weight.codes, weight.scale, *([] if weight.zero is None else [weight.zero])]
    return (
        weight.bits == 4
        and weight.group % INT4_CHUNK == 0
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.scale.dtype in _SCALES
        and zero_type in _ZEROS
        and x.stride(0) % 4 == 0
        and all(one.data_ptr() % 16 == 0 and one.stride(-1) == 1 for one in tensors)
        and shared_bytes(weight, tile_for(*weight.shape, len(x)), len(x)) <= MOST_SHARED
    )


def int_linear(
    x: Tensor, weight: IntWeight, bias: Tensor | None, tile: Tile | None = None
) -> Tensor:
    num_rows, columns = x.shape
    num_outs = weight.shape[0]
    tile = tile or tile_for(num_outs, columns, num_rows)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    out = torch.empty((num_rows, num_outs), dtype=x.dtype, device=x.device)
    eights = _eights(num_rows)
    defines = (
        ("TYPE", 0 if x.dtype == torch.bfloat16 else 1),
        ("NT", tile.sixteens),
        ("MT", eights),
        ("WARPS", tile.warps),
        ("SLOTS", tile.slots),
        ("GROUP", weight.group),
        ("CENTRE", tile.centre),
        ("SCALE", _SCALES[weight.scale.dtype]),
        ("ZERO", _ZEROS[None if weight.zero is None else weight.zero.dtype]),
        ("BIAS", int(bias is not None)),
    )
    shared = shared_bytes(weight, tile, num_rows)
    kernel = compiled(_SOURCE, "int4_rows", defines, shared, x.device.index or 0)
    kernel.launch(
        (-(-num_outs // (16 * tile.sixteens)), -(-num_rows // (8 * eights)), 1),
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
