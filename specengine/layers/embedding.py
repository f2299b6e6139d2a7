"""Token embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specengine.core.parallel import Cut, VocabularyCut
from specengine.kernels.head.embed_rows import embed_rows
from specengine.kernels.linear.joined_norm import joined_norm
from specengine.layers.module import Module
from specengine.layers.norm import RMSNorm
from specengine.layers.split_ops import sum_over


class VocabEmbedding(Module):
    """A core.interfaces.Embedding: rows of a [vocab_size, hidden_size] table, as checkpoints hold
    them. A family's multiplier is no part of it: LayerSpec.start_stream. Ranks have the rows of
    some tokens each."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tokens = VocabularyCut.of(vocab_size)
        self.has_all = True  # False: ids past the table may come, and are read as its last row
        rows = self.tokens.cut.size
        self.weight = nn.Parameter(torch.empty(rows, hidden_size), requires_grad=False)

    def cuts(self, kind: str) -> Sequence[Cut | None]:
        """As Linear's."""
        return [self.tokens.cut]

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]."""
        if not self.has_all:
            input_ids = input_ids.clamp(max=self.tokens.cut.whole - 1)
        if self.tokens.is_whole:
            return embed_rows(self.weight, input_ids)
        places = input_ids - self.tokens.cut.start
        is_here = (places >= 0) & (places < len(self.weight))
        rows = embed_rows(self.weight, places.where(is_here, 0))
        # One rank's row and zeros: the sum is that row, to the bit.
        return sum_over(self.tokens.ranks, rows.masked_fill(~is_here[:, None], 0.0))

    def joined_norm(
        self, input_ids: Tensor, features: Tensor, own_norm: RMSNorm, feature_norm: RMSNorm
    ) -> Tensor:
        """``cat(own_norm(self(input_ids)), feature_norm(features))``, in one kernel if the table is
        whole, with own_norm's epsilon for both: int64 [T], [T, hidden_size] -> [T, 2 hidden_size].
        """
        if not self.tokens.is_whole:
            return torch.cat([own_norm(self(input_ids)), feature_norm(features)], dim=-1)
        gains = own_norm.weight, feature_norm.weight
        return joined_norm(self.weight, input_ids, features, *gains, own_norm.eps)
