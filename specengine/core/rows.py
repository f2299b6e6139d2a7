"""Requests as rounds on the device see them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowBatch:
    """Requests whose state lies on the device, and that the host may know an older state of."""

    rows_B: Tensor  # int64, of the page table; row 0 pads
    lens_B: Tensor  # int64, tokens whose KV is kept
    roots_B: Tensor  # int64, the last token of each
