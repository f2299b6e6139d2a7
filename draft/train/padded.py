"""Causal attention within the documents of a batch, in PyTorch's own kernels.

Documents of like length lie side by side, padded at their ends: a document's rows see nothing
behind its last one, so causal attention needs no mask, and the fast kernels take it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class PaddedDocuments:
    """Where the rows of documents lie once those of like length are side by side."""

    shapes: list[tuple[int, int]]  # (documents, rows each) of a group
    places: Tensor  # int64 [T], of each row in the groups, one group after another

    @classmethod
    def of(cls, lens: list[int], device: torch.device) -> PaddedDocuments:
        """Documents in one group are at most twice as long as one another."""
        groups: dict[int, list[int]] = {}
        for index, length in enumerate(lens):
            groups.setdefault((length - 1).bit_length(), []).append(index)
        shapes, starts, begin = [], [0] * len(lens), 0
        for members in groups.values():
            longest = max(lens[index] for index in members)
            shapes.append((len(members), longest))
            for index in members:
                starts[index], begin = begin, begin + longest
        shifts = [s - at for s, at in zip(starts, accumulate(lens, initial=0), strict=False)]
        places = torch.repeat_interleave(torch.tensor(shifts), torch.tensor(lens))
        return cls(shapes, (places + torch.arange(len(places))).to(device, non_blocking=True))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, num_heads, D], k and v [T, num_kv_heads, D] -> [T, num_heads, D]."""
        heads, kv_heads = q.shape[1], k.shape[1]
        sizes = [documents * rows for documents, rows in self.shapes]
        joined = torch.cat([q, k, v], dim=1)
        padded = joined.new_zeros(sum(sizes), *joined.shape[1:]).index_copy(0, self.places, joined)
        parts = []
        for group, shape in zip(torch.split(padded, sizes), self.shapes, strict=True):
            rows = group.view(*shape, *group.shape[1:]).transpose(1, 2)  # [documents, heads, ...]
            q, k, v = torch.split(rows, [heads, kv_heads, kv_heads], dim=1)
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=heads != kv_heads
            )
            parts.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, self.places)
