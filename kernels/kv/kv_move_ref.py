"""Moves KV of accepted paths, in plain PyTorch."""

from __future__ import annotations

import torch

from specengine.kernels.kv.types import KVBuffers, KVPaths


def kv_move(buffers: KVBuffers, paths: KVPaths) -> None:
    req_to_token, nodes_BW, lens_B1 = paths.req_to_token, paths.nodes_BW, paths.lens_B[:, None]
    rows_B1 = paths.rows_B[:, None]
    order_W = torch.arange(nodes_BW.shape[1], device=nodes_BW.device)
    source_BW = lens_B1 + nodes_BW
    moves = (order_W <= paths.accepted_B[:, None]) & (rows_B1 != 0)
    moves &= (source_BW < req_to_token.shape[1]) & (nodes_BW != order_W)
    # What does not move goes from slot 0 to slot 0, which no request owns.
    source_BW = source_BW.where(moves, 0)
    target_BW = (lens_B1 + order_W).where(moves, 0)
    source = req_to_token[rows_B1, source_BW].long().where(moves, 0).flatten()
    target = req_to_token[rows_B1, target_BW].long().where(moves, 0).flatten()
    for buffer in buffers.tensors:
        buffer[target] = buffer[source]
