"""Where the new tokens of requests go, from lengths that only the device knows."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.kv import row_places_ref
from specengine.kernels.kv.types import RowPlaces


def row_places(
    req_to_token: Tensor,
    rows_B: Tensor,
    lens_B: Tensor,
    width: int,
    offset: int = 0,
    depths_T: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> RowPlaces:
    """Places of `width` new tokens a request, after `lens_B[b] + offset` others::

        for b in range(B):
            seq_lens[b] = lens[b] + offset + width
            for j in range(width):
                place = lens[b] + offset + j
                position = place if depths is None else lens[b] + depths[b, j]
                positions[b, j] = min(position, C - 1)
                slots[b, j] = req_to_token[rows[b], place] if place < C else 0

    req_to_token: int32 [num_rows, C]; rows_B, lens_B: int64 [B]; depths_T: int64 [B * W], of a
    tree's nodes. Places past the end of the table share slot 0, which no request owns. Any
    device; Triton on CUDA.
    """
    given = req_to_token, rows_B, lens_B, width, offset, depths_T
    if use_triton(backend, rows_B):
        from specengine.kernels.kv import row_places_triton

        return row_places_triton.row_places(*given)
    return row_places_ref.row_places(*given)
