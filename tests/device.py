"""Where tests of what runs on any device run: on this machine's GPU, where it has one."""

from __future__ import annotations

import pytest
import torch

# What a module that needs the instructions of Hopper is marked with.
ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="no CUDA device of compute capability 9.0 or more",
    ),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
