"""Random weights, to measure an architecture without its checkpoint."""

from __future__ import annotations

import torch
from torch import nn


def fill_with_random(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """Norm weights 1, biases 0, all others normal with deviation `std`, on each one's device."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # of a quantised layer (layers/quantization/linears.py)
            continue
        if name.endswith(".bias"):
            parameter.data.zero_()
        elif parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            if parameter.device not in generators:
                generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
            parameter.data.normal_(0.0, std, generator=generators[parameter.device])
