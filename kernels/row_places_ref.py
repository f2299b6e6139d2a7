"""Places of new tokens, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specengine.kernels.row_places import Places


def row_places(
    req_to_token: Tensor, rows_B: Tensor, lens_B: Tensor, width: int, offset: int
) -> Places:
    from specengine.kernels.row_places import Places

    last = req_to_token.shape[1] - 1
    steps = torch.arange(offset, offset + width, device=lens_B.device)
    places = lens_B[:, None] + steps
    positions = places.clamp(max=last)
    slots = req_to_token[rows_B[:, None], positions].to(torch.int64)
    slots = slots.where(places <= last, 0)
    return Places(positions.view(-1), slots.view(-1), lens_B + offset + width)
