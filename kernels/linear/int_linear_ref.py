"""A product with a weight of 4 or 8 bits, in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.linear.quantised import IntWeight


def int_linear(x: Tensor, weight: IntWeight, bias: Tensor | None) -> Tensor:
    out = F.linear(x.float(), weight.dequantised(), None if bias is None else bias.float())
    return out.to(x.dtype)
