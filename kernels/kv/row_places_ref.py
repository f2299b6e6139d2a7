"""Places of new tokens, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.kv.types import RowPlaces


def row_places(
    req_to_token: Tensor,
    rows_B: Tensor,
    lens_B: Tensor,
    width: int,
    offset: int,
    depths_T: Tensor | None,
) -> RowPlaces:
    last = req_to_token.shape[1] - 1
    steps = torch.arange(offset, offset + width, device=lens_B.device)
    places = lens_B[:, None] + steps
    slots = req_to_token[rows_B[:, None], places.clamp(max=last)].to(torch.int64)
    slots = slots.where(places <= last, 0)
    positions = places if depths_T is None else lens_B[:, None] + depths_T.view(-1, width)
    return RowPlaces(positions.clamp(max=last).view(-1), slots.view(-1), lens_B + offset + width)
