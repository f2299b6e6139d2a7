"""Checkpoints that keep all experts of a layer in one tensor, or an expert's two in one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError

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


# What follows the name of a tensor of all experts, in FP8 -> the leaf that one expert's has.
_SCALES = {
    "_weight_scale_inv": "weight_scale_inv",
    "_scale_inv": "weight_scale_inv",  # transformers, Qwen
    "_weight_scale": "weight_scale",  # ModelOpt
    "_input_scale": "input_scale",
    "_activation_scale": "activation_scale",
}


@dataclass(frozen=True)
class _Form:
    """Of a tensor of all experts, as it is in the checkpoint."""

    shape: torch.Size
    is_swapped: bool

    @property
    def rows(self) -> int:
        """Outputs."""
        return self.shape[2 if self.is_swapped else 1]

    def upright(self, tensor: Tensor) -> Tensor:
        """A row an output: the weight, its scales, or a bias."""
        return tensor.transpose(1, 2) if self.is_swapped and tensor.dim() == 3 else tensor


@dataclass(frozen=True)
class ExpertTensors:
    """How a checkpoint packs the experts of a layer: the names of its tensors behind the layer's,
    [E, 2 I, H] and [E, H, I]. swapped: the last two dimensions are the other way round.
    interleaved: rows of gate and up take turns, else gate comes before up. leaf: of an expert's
    own tensor; None is "weight", or "bias" of a tensor of two dimensions. inputs: H, where the
    shapes show whether dimensions are swapped; where they do not, they are."""

    gate_up: str
    down: str
    swapped: bool = False
    interleaved: bool = False
    leaf: str | None = None
    inputs: int | None = None

    def split(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), with each expert under the names of layers/experts.py; scales behind
        their weight. Raises ModelLoadError for scales that do not come apart."""
        forms: dict[str, _Form] = {}  # of weights
        early: dict[str, list[tuple[str, Tensor]]] = {}  # scales that come before their weight
        for name, tensor in weights:
            path = name.removesuffix(_scale_of(name))
            if not path.endswith((self.gate_up, self.down)):
                yield name, tensor
            elif path == name:
                forms[name] = form = _Form(tensor.shape, self._is_swapped(name, tensor))
                yield from self._experts(
                    name, self._kind(tensor), self._parts(name, form.upright(tensor))
                )
                for scale_name, scale in early.pop(name, []):
                    yield from self._scales(scale_name, scale, name, form)
            elif path in forms:
                yield from self._scales(name, tensor, path, forms[path])
            else:
                early.setdefault(path, []).append((name, tensor))
        for scales in early.values():
            yield from scales

    def _experts(
        self, name: str, kind: str, parts: Iterable[Sequence[Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """parts: of each expert gate and up, or down."""
        is_down = name.endswith(self.down)
        start = name.removesuffix(self.down if is_down else self.gate_up)
        products = ("down_proj",) if is_down else ("gate_proj", "up_proj")
        for expert, tensors in enumerate(parts):
            for product, tensor in zip(products, tensors, strict=True):
                yield f"{start}mlp.experts.{expert}.{product}.{kind}", tensor

    def _parts(self, name: str, upright: Tensor) -> Iterator[Sequence[Tensor]]:
        for rows in upright:
            if name.endswith(self.down):
                yield [rows]
            else:
                yield (rows[::2], rows[1::2]) if self.interleaved else rows.chunk(2)

    def _scales(
        self, name: str, scale: Tensor, path: str, weight: _Form
    ) -> Iterator[tuple[str, Tensor]]:
        """path: the weight's name."""
        kind, is_down = _SCALES[_scale_of(name)], path.endswith(self.down)
        count = weight.shape[0]
        if scale.numel() in (1, count):  # one for all, or one an expert
            own = scale.reshape(-1, 1).expand(count, 1)
            parts: Iterable[Sequence[Tensor]] = ([one] * (1 if is_down else 2) for one in own)
        else:
            upright = weight.upright(scale)
            comes_apart = is_down or self._come_apart(upright, weight.rows)
            if scale.dim() < 2 or len(scale) != count or not comes_apart:
                raise ModelLoadError(
                    f"tensor {name} has shape {list(scale.shape)}, which scales of {count} experts "
                    "do not come apart from: a block that holds rows of both gate and up has one "
                    "scale for them; take a checkpoint that has a tensor for each expert"
                )
            parts = self._parts(path, upright)
        yield from self._experts(path, kind, parts)

    def _come_apart(self, scale: Tensor, rows: int) -> bool:
        """Whether no scale is of rows of gate and of up. Blocks have a power of 2 of rows, so that
        other quotients are of a last block that is cut short."""
        count = scale.shape[1] if scale.dim() > 1 else 1
        block = rows // count
        is_whole = count % 2 == 0 and rows % count == 0 and block & (block - 1) == 0
        return is_whole and (block == 1 or not self.interleaved)

    def _is_swapped(self, name: str, tensor: Tensor) -> bool:
        if self.inputs is None or tensor.dim() != 3:
            return self.swapped
        return tensor.shape[1 if name.endswith(self.gate_up) else 2] == self.inputs

    def _kind(self, tensor: Tensor) -> str:
        return self.leaf or ("weight" if tensor.dim() == 3 else "bias")


def _scale_of(name: str) -> str:
    """What of _SCALES ends a name; "" is none."""
    return next((end for end in _SCALES if name.endswith(end)), "")
