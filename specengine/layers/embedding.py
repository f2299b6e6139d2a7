"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specengine.kernels.embed_rows import embed_rows


class VocabEmbedding(nn.Module):
    """Rows of a [vocab_size, hidden_size] table."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]."""
        return embed_rows(self.weight, input_ids)
