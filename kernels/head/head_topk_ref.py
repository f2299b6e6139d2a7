"""The best tokens of each row and its log-sum-exp by block of columns, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.head.types import BlockPartials
from specengine.kernels.linear.norm_ref import rms_norm


def head_topk(
    x: Tensor, weight: Tensor, topk: int, norm_weight: Tensor | None, eps: float
) -> BlockPartials:
    normed = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    return partials_of(F.linear(normed, weight), topk, 1)


def partials_of(logits_RV: Tensor, topk: int, num_blocks: int, width: int = 1) -> BlockPartials:
    rows, cols = logits_RV.shape
    turn = num_blocks * width
    turns = -(-cols // turn) + topk  # so that each has K
    missing = turns * turn - cols

    def by_share(x_RV: Tensor) -> Tensor:
        return x_RV.view(rows, turns, num_blocks, width).transpose(1, 2).flatten(2)

    columns = torch.arange(cols, device=logits_RV.device)
    keys_RSC = by_share(F.pad(keys_of(logits_RV, columns), (0, missing)))
    x_RSC = by_share(F.pad(logits_RV.float(), (0, missing), value=float("-inf")))
    largest_RS1 = x_RSC.amax(-1, keepdim=True)
    base_RS1 = largest_RS1.where(largest_RS1 > float("-inf"), 0.0)
    sums_RS1 = (x_RSC - base_RS1).exp().sum(-1, keepdim=True)
    keys_RSK = keys_RSC.sort(dim=-1, descending=True).values[..., :topk]
    return BlockPartials(keys_RSK.contiguous(), torch.cat([largest_RS1, sums_RS1], dim=-1), width)


def keys_of(x: Tensor, columns: Tensor) -> Tensor:
    """int64, as BlockPartials has them."""
    bits = (x.float() + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, -1 - bits, bits + 2**31)
    return ordered << 31 | (2**31 - 1 - columns)
