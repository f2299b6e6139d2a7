"""From the tensors of a checkpoint to experts that are kept in the format in which they came."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from zlib import crc32

import torch
from torch import Tensor

from specengine.core.registry import EXPERT_FORMATS, load_place
from specengine.kernels.dispatch import has_triton
from specengine.kernels.experts.packed import ExpertFormat, PackedExperts
from specengine.layers.experts import Experts
from specengine.layers.moves import Plan
from specengine.layers.quantization.method import LayerTensors, Quantization
from specengine.layers.quantization.parts import Part, dense, join_parts, own_part, read_part

_BYTES_AHEAD = 256 << 20  # of a layer's experts, on the device beside those that are packed


def close_experts(
    module: Experts, method: Quantization, dtype: torch.dtype, wants_dense: bool
) -> bool:
    """Make of what was collected the weights: packed ones where products read such, else dense ones
    of `dtype`. An expert at a time, so that no layer is in memory together with its copy. Returns
    whether they are packed. Raises ModelLoadError and ConfigError."""
    reader = _Reader(module, method, dtype)
    packed = None if wants_dense or not has_triton() else reader.packed()
    if packed is None:
        reader.fill_dense()
    else:
        module.use_packed(*packed)
    module.incoming = None
    return packed is not None


def fill_experts(path: str, module: Experts, method: Quantization, seed: int) -> None:
    """Random tensors of the method, which are drawn when they are read. They follow from the
    expert's name and the seed, whatever rank draws them."""
    assert module.incoming is not None
    for name, one in module.incoming.items():
        one.name = f"{path}.{name.removesuffix('.weight')}"
        own = crc32(f"{seed} {one.name}".encode())
        one.draw = partial(_random, method, *one.whole_shape, module.device, own)


def _random(
    method: Quantization, rows: int, columns: int, device: torch.device, seed: int
) -> dict[str, Tensor]:
    return method.random_expert(rows, columns, torch.Generator(device).manual_seed(seed))


class _Reader:
    def __init__(self, module: Experts, method: Quantization, dtype: torch.dtype) -> None:
        assert module.incoming is not None
        self.module, self.incoming = module, module.incoming
        self.method, self.dtype = method, dtype
        self.arrived: dict[str, dict[str, Tensor]] = {}  # on the device, until they are read

    def packed(self) -> tuple[PackedExperts, PackedExperts] | None:
        """gate and up, and down; None where products of them have no format."""
        gate_up = self._stacked(self._gate_up)
        down = None if gate_up is None else self._stacked(self._down)
        return None if gate_up is None or down is None else (gate_up, down)

    def fill_dense(self) -> None:
        places = self.module.allocate()
        for name, place in places.items():
            place.copy_(dense(self._read(name)))

    def _stacked(self, read: Callable[[int], Part | None]) -> PackedExperts | None:
        first = read(0)
        found = _format_of(first)
        count = self.module.count
        if found is None:
            return None
        return PackedExperts.of(found, count, chain([first], map(read, range(1, count))))

    def _gate_up(self, expert: int) -> Part | None:
        return join_parts([self._read(f"{expert}.{one}_proj.weight") for one in ("gate", "up")])

    def _down(self, expert: int) -> Part | None:
        return self._read(f"{expert}.down_proj.weight")

    def _read(self, name: str) -> Part:
        """This rank's part of one product of one expert."""
        one = self.incoming[name]
        if one.draw is None and name not in self.arrived:
            self._bring(name)
        moved = self.arrived.pop(name) if one.draw is None else one.draw()
        layer = LayerTensors(one.name, *one.whole_shape, moved)
        return own_part(read_part(layer, self.method, self.dtype, keeps=False), one.cut, one.name)

    def _bring(self, name: str) -> None:
        """To the device, with the same product of experts behind this one: many are read from files
        as fast as one."""
        number, _, product = name.partition(".")
        plan, num_bytes = Plan(), 0
        for expert in range(int(number), self.module.count):
            one = self.incoming[f"{expert}.{product}"]
            num_bytes += sum(tensor.nbytes for tensor in one.tensors.values())
            if num_bytes > _BYTES_AHEAD and expert > int(number):
                break
            self.arrived[f"{expert}.{product}"] = {
                leaf: plan.moved(f"{one.name}.{leaf}", tensor, self.module.device)
                for leaf, tensor in one.tensors.items()
            }
        plan.carry_out()


def _format_of(weight: Part | None) -> ExpertFormat | None:
    for place in EXPERT_FORMATS.values():
        found: ExpertFormat = load_place(place)
        if isinstance(weight, found.holds):
            return found
    return None
