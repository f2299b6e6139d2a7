"""Moves the KV of the accepted path of each tree to where a chain would have written it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels import kv_move_ref
from specengine.kernels.dispatch import Backend, use_triton


@dataclass(frozen=True)
class KVBuffers:
    """K and V of all layers, [S, num_kv_heads, head_dim] each, contiguous and of one form."""

    tensors: Sequence[Tensor]
    addresses: Tensor  # int64 [2L], where they lie

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> KVBuffers:
        addresses = torch.tensor([one.data_ptr() for one in tensors], dtype=torch.int64)
        return cls(tensors, addresses.to(tensors[0].device))


def kv_move(
    buffers: KVBuffers,
    req_to_token: Tensor,
    rows_B: Tensor,
    lens_B: Tensor,
    nodes_BW: Tensor,
    accepted_B: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Node i of a request has its KV in the slot of place lens[b] + i::

        for b in range(B):
            slots = req_to_token[rows[b], lens[b]:]
            for k in range(accepted[b] + 1):
                for buffer in buffers:
                    buffer[slots[k]] = buffer[slots[nodes[b, k]]]    # all read before any write

    req_to_token: int32 [num_rows, C]; rows_B, lens_B, accepted_B: int64 [B]; nodes_BW: int64,
    rising along a path, the root first, which stays where it is; W at least each accepted[b] + 1.
    Nothing is moved to or from places past the end of the table, nor in row 0, which pads. Slots of
    a token take a multiple of 4 bytes. Any device; one Triton kernel on CUDA.
    """
    given = buffers, req_to_token, rows_B, lens_B, nodes_BW, accepted_B
    if use_triton(backend, nodes_BW):
        from specengine.kernels import kv_move_triton

        kv_move_triton.kv_move(*given)
        return
    kv_move_ref.kv_move(*given)
