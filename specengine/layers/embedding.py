"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specengine.kernels.head.embed_rows import embed_rows
from specengine.kernels.linear.joined_norm import joined_norm
from specengine.layers.norm import RMSNorm


class VocabEmbedding(nn.Module):
    """A core.interfaces.Embedding: rows of a [vocab_size, hidden_size] table, as checkpoints hold
    them. A family's multiplier is no part of it: LayerSpec.start_stream."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]."""
        return embed_rows(self.weight, input_ids)

    def joined_norm(
        self, input_ids: Tensor, features: Tensor, own_norm: RMSNorm, feature_norm: RMSNorm
    ) -> Tensor:
        """``cat(own_norm(self(input_ids)), feature_norm(features))`` in one kernel, with own_norm's
        epsilon for both: int64 [T], [T, hidden_size] -> [T, 2 hidden_size]."""
        gains = own_norm.weight, feature_norm.weight
        return joined_norm(self.weight, input_ids, features, *gains, own_norm.eps)
