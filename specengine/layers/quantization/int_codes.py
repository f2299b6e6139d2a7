"""What the methods of 4 and 8 bits share."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.linear.quantised import INT4_CHUNK, IntWeight
from specengine.layers.quantization.method import LayerTensors


def make_int(
    layer: LayerTensors,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    order: Tensor | None = None,
) -> IntWeight:
    """codes: uint8 [rows, columns]; scale: [rows, groups]; zero: uint8 of the same shape. Columns
    are put into `order`. Raises ModelLoadError for sizes that are not packed here."""
    groups = scale.shape[1]
    if layer.columns % groups or layer.columns // groups % INT4_CHUNK:
        raise layer.refused(
            f"has {layer.columns} inputs in {groups} groups; a group must have a multiple of "
            f"{INT4_CHUNK}"
        )
    if order is not None:
        codes = codes.index_select(1, order)
    return IntWeight.pack(codes, scale, zero, bits, order)


def sort_groups(layer: LayerTensors, groups: Tensor, size: int) -> Tensor | None:
    """groups: int [columns], the group of each input (`g_idx`, act-order). Returns the inputs in
    the order of their groups, int64 [columns]; None where they are in it."""
    expected = torch.arange(layer.columns, device=groups.device) // size
    wide = groups.to(torch.int64)
    if torch.equal(wide, expected):
        return None
    ordered, order = wide.sort(stable=True)
    if not torch.equal(ordered, expected):
        raise layer.refused(f"has a g_idx whose groups are not all of {size} inputs")
    return order


def random_words(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """int32 [rows, columns] of random bits."""
    return torch.randint(
        -(2**31), 2**31, (rows, columns), generator=generator, device=generator.device
    ).to(torch.int32)
