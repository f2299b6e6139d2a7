"""Merges two outputs of FlashAttention, and adds sinks to one."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.attention.types import FlashOutput

# Sinks of this type the libraries add to the softmax themselves. Others are added afterwards.
SINKS_DTYPE = torch.bfloat16


def merge(first: FlashOutput, second: FlashOutput) -> FlashOutput:
    """Attention over two disjoint sets of keys as attention over both: weights are exp(lse).
    `second` sees a key in every row."""
    most = torch.maximum(first.lse, second.lse)
    weights = [(one.lse - most).exp().t().unsqueeze(-1) for one in (first, second)]
    both = weights[0] * first.out + weights[1] * second.out
    out = (both / (weights[0] + weights[1])).to(first.out.dtype)
    return FlashOutput(out, torch.logaddexp(first.lse, second.lse))


def beside_sinks(found: FlashOutput, sinks: Tensor | None) -> FlashOutput:
    """With each head's sink in the softmax. sinks: [Hq]; found.out is changed, found.lse is not."""
    if sinks is None:
        return found
    kept_HT = torch.sigmoid(found.lse - sinks.float()[:, None])
    found.out.mul_(kept_HT.t()[:, :, None])  # in float32, rounded once
    return found
