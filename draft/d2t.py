"""d2t of draft checkpoints: what to add to a draft's token to have the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError


def target_ids_of(d2t: Tensor, draft_vocab_size: int, target_vocab_size: int) -> Tensor:
    """d2t: int [draft_vocab_size] -> int64 [draft_vocab_size] on the CPU, the target's ids. Raises
    ModelLoadError where they are not different ones of the target's vocabulary."""
    size, most = draft_vocab_size, target_vocab_size
    if d2t.shape != (size,):
        raise ModelLoadError(
            f"d2t has shape {list(d2t.shape)} and draft_vocab_size is {size}; they must agree"
        )
    ids = torch.arange(size, device="cpu") + d2t.cpu().to(torch.int64)
    low, high, different = int(ids.min()), int(ids.max()), len(set(ids.tolist()))
    if low < 0 or high >= most or different < size:
        raise ModelLoadError(
            f"d2t leads to token ids {low}..{high}, {different} different ones of {size}; they "
            f"must differ, and lie in the target's vocabulary (vocab_size {most}). Is it a "
            "table of ids? It must hold offsets"
        )
    return ids
