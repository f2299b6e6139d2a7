"""Filling a model's parameters from a checkpoint, and noticing everything that does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.layers.experts import Experts
from specengine.layers.linear import IncomingWeight, Linear, MergedLinear
from specengine.layers.norm import Norm

PackedModules = Mapping[str, Sequence[str]]
# A parameter, or what collects the tensors that stand for one in a quantised checkpoint.
Place = Tensor | IncomingWeight

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
    """Copy each (checkpoint name, tensor) to its parameter; each must be filled exactly. Merged
    modules may stand merged in the checkpoint too.

    packed_modules_mapping: merged module -> names of its parts in checkpoints, in their order.
    ignored: how names begin that may appear and are not read (the head of a tied model). Raises
    ModelLoadError naming a tensor that is missing, unexpected, quantised or of the wrong shape.
    """
    places = weight_places(model, packed_modules_mapping)
    weights = unpacked(model, weights, packed_modules_mapping)
    fill_places(places, weights, type(model).__name__, ignored)
    add_offsets(model)


def unpacked(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], packed: PackedModules
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor), what is merged in the checkpoint cut into its parts. Raises
    ModelLoadError for one of the wrong height."""
    merged = {name: one for name, one in model.named_modules() if isinstance(one, MergedLinear)}
    for name, tensor in weights:
        path, _, kind = name.rpartition(".")
        if path not in merged:
            yield name, tensor
            continue
        if kind != "bias" and merged[path].incoming is not None:
            merged[path].take_merged(name, tensor)
            continue
        parent, _, leaf = path.rpartition(".")
        sizes = merged[path].shard_sizes
        if tensor.shape[0] != sum(sizes):
            raise ModelLoadError(
                f"tensor {name} has shape {list(tensor.shape)}, the model needs {sum(sizes)} rows"
            )
        for part, shard in zip(packed[leaf], torch.split(tensor, sizes), strict=True):
            yield f"{parent}.{part}.{kind}", shard


def add_offsets(model: nn.Module) -> None:
    """To the gains of norms that checkpoints store without (Norm.offset). Once, when filled."""
    for module in model.modules():
        if isinstance(module, Norm) and module.offset:
            module.weight.add_(module.offset)


def renamed(
    weights: Iterable[tuple[str, Tensor]], names: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor), each part of a name between dots replaced by what it is called
    here."""
    for name, tensor in weights:
        yield ".".join(names.get(part, part) for part in name.split(".")), tensor


def halved(
    weights: Iterable[tuple[str, Tensor]], head_dim: int, rotary_dim: int
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor), rows of q_proj and k_proj reordered so that rotary pairs, which
    stand side by side in the checkpoint, (2i, 2i + 1), stand half a rotation apart, (i, i +
    rotary_dim / 2). Scores are sums over a head's rows, so that their order is free."""
    pairs = torch.arange(rotary_dim).view(-1, 2).t().reshape(-1)
    order = torch.cat((pairs, torch.arange(rotary_dim, head_dim)))
    for name, tensor in weights:
        if name.split(".")[-2:-1] in (["q_proj"], ["k_proj"]):
            if tensor.dtype not in _WEIGHTS or not name.endswith((".weight", ".bias")):
                raise ModelLoadError(
                    f"tensor {name} is quantised, and rows of this family's q and k stand in "
                    "rotary pairs, which only weights in floating point are taken out of"
                )
            heads = tensor.view(-1, head_dim, *tensor.shape[1:])
            tensor = heads[:, order].reshape(tensor.shape)
        yield name, tensor


def fill_places(
    places: Mapping[str, Place],
    weights: Iterable[tuple[str, Tensor]],
    model_name: str,
    ignored: Sequence[str] = (),
) -> None:
    """`load_weights` for parameters that the caller has named: checkpoint name -> parameter."""
    missing, ignored = set(places), tuple(ignored)
    for name, tensor in weights:
        if name.startswith(ignored) or name.endswith(_COMPUTED):
            continue
        weight_name = name.rpartition(".")[0] + ".weight"
        collector = None if name.endswith(".bias") else places.get(weight_name)
        if isinstance(collector, IncomingWeight):
            collector.take(name, tensor)
            missing.discard(weight_name)
            continue
        if name not in places:
            raise ModelLoadError(
                f"unexpected tensor {name} {list(tensor.shape)}: {model_name} has no such "
                "parameter; config.json and weights do not belong together"
            )
        _copy(name, tensor, places[name])
        missing.discard(name)
    missing = {name for name in missing if not _came_merged(places[name])}
    if missing:
        raise ModelLoadError(_missing_message(sorted(missing)))


def _came_merged(place: Place) -> bool:
    return isinstance(place, IncomingWeight) and place.came_merged


def weight_places(model: nn.Module, packed: PackedModules) -> dict[str, Place]:
    """Checkpoint name -> the parameter, or the part of a merged one, that it fills. A parameter
    that two modules share is filled under its first name."""
    places: dict[str, Place] = {}
    shared: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            places |= {f"{path}.{name}": view for name, view in module.named_shards()}
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shared:
                continue
            shared.add(id(parameter))
            parent, _, leaf = path.rpartition(".")
            if isinstance(module, MergedLinear):
                parts = zip(packed[leaf], _views(module, kind, parameter), strict=True)
                places |= {f"{parent}.{part}.{kind}": view for part, view in parts}
            elif isinstance(module, Linear):
                places[f"{path}.{kind}"] = _views(module, kind, parameter)[0]
            else:
                places[f"{path}.{kind}"] = parameter
    return places


def _views(module: Linear, kind: str, parameter: Tensor) -> Sequence[Place]:
    """What each part of a linear layer fills."""
    if kind == "weight" and module.incoming is not None:
        return module.incoming
    return module.shards(parameter) if isinstance(module, MergedLinear) else [parameter]


def _copy(name: str, tensor: Tensor, place: Place) -> None:
    assert isinstance(place, Tensor), "a collector takes all tensors of its layer"
    if tensor.dtype not in _WEIGHTS:
        raise ModelLoadError(
            f"tensor {name} has type {tensor.dtype}, and config.json names no quantisation of it; "
            "without its scales it is no weight"
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
