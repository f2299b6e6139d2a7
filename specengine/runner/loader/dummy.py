"""Random weights, to measure an architecture without its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import torch
from torch import Tensor, nn

from specengine.layers.linear import IncomingWeight
from specengine.layers.weights import CutPlace, module_places


def fill_with_random(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """Norm weights 1, biases 0, all others normal with deviation `std`, on each one's device. What
    a weight is follows from its name and the seed: ranks that share a model have parts of the
    weights that one rank alone would have."""
    for name, place in _places(model):
        tensor = place if isinstance(place, Tensor) else place.tensor
        if ".bias." in name:
            tensor.zero_()
        elif len(place.shape) == 1:
            tensor.fill_(1.0)
        else:
            generator = torch.Generator(tensor.device)
            generator.manual_seed(crc32(f"{seed} {name}".encode()))
            whole = tensor if place is tensor else tensor.new_empty(place.shape)
            whole.normal_(0.0, std, generator=generator)
            if whole is not tensor:
                place.copy_(whole)


def _places(model: nn.Module) -> Iterator[tuple[str, Tensor | CutPlace]]:
    """Each parameter once, parts of merged layers one by one. Leaves out weights of quantised
    layers, which layers/quantization/linears.py fills."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or parameter.is_meta:
                continue
            seen.add(id(parameter))
            for index, place in enumerate(module_places(module, kind, parameter.data)):
                assert not isinstance(place, IncomingWeight)
                yield f"{path}.{kind}.{index}", place
