"""Where KV lies, and which of it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    """Which nodes of each request's tree are accepted."""

    req_to_token: Tensor  # int32 [num_rows, C]
    rows_B: Tensor  # int64, of req_to_token; row 0 pads
    lens_B: Tensor  # int64, tokens before the tree
    nodes_BW: Tensor  # int64, rising along a path, the root first
    accepted_B: Tensor  # int64, below the root; less than W


@dataclass(frozen=True)
class RowPlaces:
    positions_T: Tensor  # int64 [B * W]
    slots_T: Tensor  # int64 [B * W], in the KV pool
    seq_lens_B: Tensor  # int64 [B], the new tokens included
