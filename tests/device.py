"""Where tests of what runs on any device run: on this machine's GPU, where it has one."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
