"""What a method of quantisation states, and the tensors that it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.kernels.linear.linear_format import QuantisedWeight
from specengine.layers.linear import PLAIN_TYPES, IncomingWeight
from specengine.layers.moves import Plan

# Beside the tensors of a layer: int64 [rows], the row of theirs that each row of the weight is.
ROW_ORDER = "row_order"


@dataclass
class LayerTensors:
    """The tensors that a checkpoint has for a linear layer [rows, columns], by leaf of their names.
    `name`: the layer's. Each is asked for once; `finish` refuses what was not asked for."""

    name: str
    rows: int
    columns: int
    tensors: dict[str, Tensor]

    @classmethod
    def of(
        cls, incoming: IncomingWeight, rows: int, columns: int, device: torch.device | None = None
    ) -> LayerTensors:
        """device: where they are moved to; None leaves them where they were collected."""
        plan, tensors = Plan(), dict(incoming.tensors)
        if device is not None:
            for leaf, tensor in incoming.tensors.items():
                tensors[leaf] = plan.moved(f"{incoming.name}.{leaf}", tensor, device)
        plan.carry_out()
        return cls(incoming.name, rows, columns, tensors)

    def has(self, leaf: str) -> bool:
        return leaf in self.tensors

    def need(self, *leaves: str) -> Tensor:
        """The one that is there, of names that mean the same. Raises ModelLoadError."""
        for leaf in leaves:
            if leaf in self.tensors:
                return self.tensors.pop(leaf)
        there = ", ".join(sorted(self.tensors)) or "no other"
        raise ModelLoadError(
            f"missing tensor {self.name}.{' or '.join(leaves)}: beside it the checkpoint has "
            f"{there}; it is incomplete, or quantised otherwise than it says"
        )

    def shaped(self, leaf: str, *shape: int) -> Tensor:
        """`need`, of this shape."""
        tensor = self.need(leaf)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"tensor {self.name}.{leaf} has shape {list(tensor.shape)}, the model needs "
                f"{list(shape)}"
            )
        return tensor

    def drop(self, *leaves: str) -> None:
        """These repeat what the others say."""
        for leaf in leaves:
            self.tensors.pop(leaf, None)

    @property
    def is_plain(self) -> bool:
        """Whether the layer is not quantised, as those that a method left out."""
        weight = self.tensors.get("weight")
        return weight is not None and weight.dtype in PLAIN_TYPES

    def finish(self) -> None:
        for leaf in sorted(self.tensors):
            raise ModelLoadError(
                f"unexpected tensor {self.name}.{leaf} {list(self.tensors[leaf].shape)}: the "
                "quantisation that config.json names has no such tensor"
            )

    def refused(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"the weight of {self.name} {why}")


class Quantization(ABC):
    """The quantisation of one checkpoint.

    Layers that it left in floating point (`ignore`, `modules_to_not_convert`, mostly the head) are
    recognised by their tensors: such a layer has `weight` in floating point, and no method is
    asked. keeps_gguf: whether it is given a GGUF file's blocks, and serves GGUF files alone.
    """

    keeps_gguf: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Quantization:
        """fields: `quantization_config` of config.json, or what takes its place. Raises
        ModelLoadError, naming what is not supported."""

    @abstractmethod
    def read(self, layer: LayerTensors) -> QuantisedWeight:
        """Raises ModelLoadError, naming the tensor that is missing or does not fit."""

    @abstractmethod
    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Tensors of a layer by leaf, on the generator's device: random weights, of a deviation of
        about 0.02."""

    def random_expert(
        self, rows: int, columns: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """`random` of a product of an expert, where methods quantise those otherwise."""
        return self.random(rows, columns, generator)

    def encode(self, weight: Tensor) -> QuantisedWeight | None:
        """The quantised weight of a floating point layer, [N, K], for methods that quantise at
        load. None: it stays as it is."""
        return None


def require(fields: Mapping[str, Any], method: str, **wanted: tuple[Any, ...]) -> None:
    """Raises ModelLoadError for a field that is there with a value that is not supported."""
    for name, values in wanted.items():
        if name in fields and fields[name] not in values:
            known = ", ".join(map(repr, values))
            raise ModelLoadError(
                f"quantisation {method}: {name} {fields[name]!r} is not supported; known: {known}"
            )


def unpack_int32(packed: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> uint8 [..., n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)
