"""Checkpoints that keep all experts of a layer in one tensor, or an expert's two in one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

# Leaves: floating point, or a GGUF file's blocks, a row's one after the other.
_MERGED = re.compile(r"(.*\.experts\.\d+)\.gate_up_proj\.(weight|bias|q\d_\w|mxfp4)")


def cut_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor), what one expert has as gate_up_proj cut into gate and up."""
    for name, tensor in weights:
        found = _MERGED.fullmatch(name)
        if found is None:
            yield name, tensor
        else:
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield f"{found[1]}.{part}.{found[2]}", half


@dataclass(frozen=True)
class ExpertTensors:
    """How a checkpoint packs the experts of a layer: the names of its tensors behind the layer's,
    [E, 2 I, H] and [E, H, I]. swapped: the last two dimensions are the other way round.
    interleaved: rows of gate and up take turns, else gate stands before up. leaf: of an expert's
    own tensor; None is "weight", or "bias" of a tensor of two dimensions."""

    gate_up: str
    down: str
    swapped: bool = False
    interleaved: bool = False
    leaf: str | None = None

    def split(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), with each expert under the names of layers/experts.py."""
        for name, tensor in weights:
            if name.endswith(self.gate_up):
                for expert, rows in enumerate(self._upright(tensor)):
                    halves = (rows[::2], rows[1::2]) if self.interleaved else rows.chunk(2)
                    start = f"{name.removesuffix(self.gate_up)}mlp.experts.{expert}."
                    for part, half in zip(("gate_proj", "up_proj"), halves, strict=True):
                        yield f"{start}{part}.{self._kind(tensor)}", half
            elif name.endswith(self.down):
                for expert, rows in enumerate(self._upright(tensor)):
                    start = f"{name.removesuffix(self.down)}mlp.experts.{expert}."
                    yield f"{start}down_proj.{self._kind(tensor)}", rows
            else:
                yield name, tensor

    def _upright(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if self.swapped and tensor.dim() == 3 else tensor

    def _kind(self, tensor: Tensor) -> str:
        return self.leaf or ("weight" if tensor.dim() == 3 else "bias")
