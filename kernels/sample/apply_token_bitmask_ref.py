"""Token bitmasks in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_bitmask(logits: Tensor, words: Tensor, slots: Tensor) -> Tensor:
    rows = (slots >= 0).nonzero().squeeze(1)
    octets = words[slots[rows]].view(torch.uint8)  # little-endian: the lowest bits come first
    bits = 2 ** torch.arange(8, dtype=torch.uint8, device=words.device)
    forbidden = (octets[:, :, None] & bits == 0).flatten(1)[:, : logits.shape[1]]
    out = logits.clone()
    out[rows] = out[rows].masked_fill(forbidden, float("-inf"))
    return out
