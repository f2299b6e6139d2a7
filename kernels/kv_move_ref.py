"""Moves KV of accepted paths, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specengine.kernels.kv_move import KVBuffers


def kv_move(
    buffers: KVBuffers,
    req_to_token: Tensor,
    rows_B: Tensor,
    lens_B: Tensor,
    nodes_BW: Tensor,
    accepted_B: Tensor,
) -> None:
    order_W = torch.arange(nodes_BW.shape[1], device=nodes_BW.device)
    source_BW = lens_B[:, None] + nodes_BW
    moves = (order_W <= accepted_B[:, None]) & (rows_B != 0)[:, None]
    moves &= (source_BW < req_to_token.shape[1]) & (nodes_BW != order_W)
    # What does not move goes from slot 0 to slot 0, which nobody owns.
    source_BW = source_BW.where(moves, 0)
    target_BW = (lens_B[:, None] + order_W).where(moves, 0)
    source = req_to_token[rows_B[:, None], source_BW].long().where(moves, 0).flatten()
    target = req_to_token[rows_B[:, None], target_BW].long().where(moves, 0).flatten()
    for buffer in buffers.tensors:
        buffer[target] = buffer[source]
