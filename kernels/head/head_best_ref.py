"""The best token of each row in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.linear.norm_ref import rms_norm


def head_best(
    x: Tensor, weight: Tensor, norm_weight: Tensor | None, eps: float, ids: Tensor | None
) -> Tensor:
    best = F.linear(x if norm_weight is None else rms_norm(x, norm_weight, eps), weight).argmax(-1)
    return best if ids is None else ids[best]
