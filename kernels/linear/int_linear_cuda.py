"""Products with a weight of 4 bits in CUDA C++: codes stream through shared memory.

A kernel for up to 8 rows with groups of 128, of which a block has all outputs at once, one for few
rows, whose warps share the depth, and one for dozens and hundreds, whose warps share the outputs
(int4_turn_tiles.py and int4_tiles.py choose). Up to 128 rows they add in the same order: a row's
bits do not depend on the rows beside it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import MOST_SHARED, has_warpgroups
from specengine.kernels.linear.int4_tiles import (
    EXACT_ROWS,
    FEW_ROWS,
    STAGE,
    Tile,
    few_rows,
    few_tile,
    most_rows,
    ways_of,
    wide_tile,
)
from specengine.kernels.linear.int4_turn_tiles import TurnTile, turn_tile
from specengine.kernels.linear.quantised import INT4_CHUNK, IntWeight

_SOURCES = Path(__file__).parents[1] / "cuda"
_SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_ZEROS = {None: 0, torch.uint8: 1, torch.float32: 2}


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


def takes_wide(x: Tensor, weight: IntWeight) -> bool:
    """Whether the kernel for dozens of rows computes a product that `takes`: a card that multiplies
    by four warps together, groups of whole stages, a stage or more for each way, whole zeros, and
    rows of outputs of whole 8 bytes. Beyond 128 rows it scales weights in half precision, by two
    terms, which hold a scale of half precision and no float32."""
    num_outs, columns = weight.shape
    scales = (torch.float16,) if x.dtype == torch.float16 else (torch.float16, torch.bfloat16)
    return (
        has_warpgroups(x)
        and weight.group % STAGE == 0
        and columns >= ways_of(num_outs, columns) * STAGE
        and (weight.zero is None or weight.zero.dtype == torch.uint8)
        and num_outs % 4 == 0
        and len(x) <= most_rows(num_outs, columns)
        and (len(x) <= EXACT_ROWS or weight.scale.dtype in scales)
    )


def takes_gated(weight: IntWeight) -> bool:
    """Whether the kernels also compute silu(gate) * up of a product that they compute, of a weight
    whose rows of gate come before as many of up: whose scales and zeros begin at whole 16 bytes,
    and of outputs of which rows have whole 8 bytes."""
    num_outs = weight.shape[0]
    held = [weight.scale, *([] if weight.zero is None else [weight.zero])]
    return num_outs % 8 == 0 and all(one.nbytes // 2 % 16 == 0 for one in held)


def is_faster(x: Tensor, weight: IntWeight) -> bool:
    """Whether these kernels are faster than Triton's, and than dequantising the weight."""
    return len(x) <= FEW_ROWS or takes_wide(x, weight)


def tile_for(x: Tensor, weight: IntWeight) -> Tile | TurnTile:
    if (tile := turn_tile(weight, len(x))) is not None:
        return tile
    if not takes_wide(x, weight):  # a block for 16 rows, whose scales fit (`takes`)
        return few_tile(*weight.shape, min(len(x), FEW_ROWS))
    if len(x) <= few_rows(*weight.shape):
        return few_tile(*weight.shape, len(x))
    return wide_tile(weight, len(x))


def int_linear(
    x: Tensor,
    weight: IntWeight,
    bias: Tensor | None,
    tile: Tile | TurnTile | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """gated: silu of the first half of the outputs, times the second half; an even number of
    `sixteens` in the tile."""
    num_rows, columns = x.shape
    num_outs = weight.shape[0]
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    stored = num_outs // 2 if gated else num_outs
    out = torch.empty((num_rows, stored), dtype=x.dtype, device=x.device)
    tile = tile or tile_for(x, weight)
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
        "GATED": int(gated),
        **tile.defines,
    }
    if isinstance(tile, TurnTile):
        defines["COLUMNS"] = columns
    source, device = _SOURCES / f"{tile.kernel}.cu", x.device.index or 0
    compiled(source, tile.kernel, tuple(defines.items()), shared, device).launch(
        tile.grid(num_outs, num_rows),
        tile.threads,
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
