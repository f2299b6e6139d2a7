"""Filling a model's parameters from a checkpoint, and noticing everything that does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.layers.linear import MergedLinear

PackedModules = Mapping[str, Sequence[str]]

# Tables that old checkpoints carry and every model computes for itself.
_COMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")

# What a tensor holds is its weights. Others are of quantised checkpoints, FP8 among them: floating
# point, and wrong by their scales.
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_weights(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    packed_modules_mapping: PackedModules,
    ignored: Sequence[str] = (),
) -> None:
    """Copy each (checkpoint name, tensor) to its parameter; each must be filled exactly.

    packed_modules_mapping: merged module -> names of its parts in checkpoints, in their order.
    ignored: how names begin that may appear and are not read (the head of a tied model). Raises
    ModelLoadError naming a tensor that is missing, unexpected, quantised or of the wrong shape.
    """
    places = weight_places(model, packed_modules_mapping)
    fill_places(places, weights, type(model).__name__, ignored)


def fill_places(
    places: Mapping[str, Tensor],
    weights: Iterable[tuple[str, Tensor]],
    model_name: str,
    ignored: Sequence[str] = (),
) -> None:
    """`load_weights` for parameters that the caller has named: checkpoint name -> parameter."""
    missing, ignored = set(places), tuple(ignored)
    for name, tensor in weights:
        if name.startswith(ignored) or name.endswith(_COMPUTED):
            continue
        if name not in places:
            raise ModelLoadError(
                f"unexpected tensor {name} {list(tensor.shape)}: {model_name} has no such "
                "parameter; config.json and weights do not belong together"
            )
        _copy(name, tensor, places[name])
        missing.discard(name)
    if missing:
        raise ModelLoadError(_missing_message(sorted(missing)))


def weight_places(model: nn.Module, packed: PackedModules) -> dict[str, Tensor]:
    """Checkpoint name -> the parameter, or the part of a merged one, that it fills. A parameter
    that two modules share is filled under its first name."""
    places: dict[str, Tensor] = {}
    shared: set[int] = set()
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shared:
                continue
            shared.add(id(parameter))
            if isinstance(module, MergedLinear):
                parent, _, leaf = path.rpartition(".")
                parts = zip(packed[leaf], module.shards(parameter), strict=True)
                places |= {f"{parent}.{part}.{kind}": view for part, view in parts}
            else:
                places[f"{path}.{kind}"] = parameter
    return places


def _copy(name: str, tensor: Tensor, place: Tensor) -> None:
    if tensor.dtype not in _WEIGHTS:
        raise ModelLoadError(
            f"tensor {name} has type {tensor.dtype}; quantised checkpoints are not supported"
        )
    if tensor.shape != place.shape:
        raise ModelLoadError(
            f"tensor {name} has shape {list(tensor.shape)}, the model needs {list(place.shape)}"
        )
    place.copy_(tensor)


def _missing_message(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"missing tensor {shown}{more}: the checkpoint is incomplete or of another model"
