"""What FlashAttention's outputs become: two sets of keys as one, and a softmax with sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.attention.types import FlashOutput

# Of sinks that the libraries add to the softmax themselves.
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
    """The softmax to which each head's sink is added. sinks: [Hq]; found.out is changed."""
    if sinks is None:
        return found
    sinks_H1 = sinks.float()[:, None]
    kept_HT = torch.sigmoid(found.lse - sinks_H1)
    # In float32, rounded once.
    return FlashOutput(found.out.mul_(kept_HT.t()[:, :, None]), found.lse.logaddexp(sinks_H1))
