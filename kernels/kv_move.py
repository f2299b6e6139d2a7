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
        return cls(tensors, addresses.to(tensors[0].device) if tensors else addresses)


@dataclass(frozen=True)
class KVPaths:
    """Which nodes of each request's tree stand."""

    req_to_token: Tensor  # int32 [num_rows, C]
    rows_B: Tensor  # int64, of req_to_token; row 0 pads
    lens_B: Tensor  # int64, tokens before the tree
    nodes_BW: Tensor  # int64, rising along a path, the root first
    accepted_B: Tensor  # int64, below the root; less than W


def kv_move(buffers: KVBuffers, paths: KVPaths, *, backend: Backend = "auto") -> None:
    """Node i of a request has its KV in the slot of place lens[b] + i::

        for b in range(B):
            slots = req_to_token[rows[b], lens[b]:]
            for k in range(accepted[b] + 1):
                for buffer in buffers:
                    buffer[slots[k]] = buffer[slots[nodes[b, k]]]    # all read before any write

    Nothing is moved to or from places past the end of the table, nor in row 0. Slots of a token
    take a multiple of 4 bytes. Any device; one Triton kernel on CUDA.
    """
    if use_triton(backend, paths.nodes_BW):
        from specengine.kernels import kv_move_triton

        kv_move_triton.kv_move(buffers, paths)
        return
    kv_move_ref.kv_move(buffers, paths)
