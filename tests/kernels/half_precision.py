"""How near results in half precision must be."""

from __future__ import annotations

import torch
from torch import Tensor


def close(actual: Tensor, expected: Tensor) -> None:
    bound = 0.02 * float(expected.float().abs().max())
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.02, atol=bound)
