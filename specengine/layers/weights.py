"""Filling a model's parameters from a checkpoint, and noticing everything that does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.core.parallel import AnyCut
from specengine.layers.expert_tensors import cut_experts
from specengine.layers.experts import Experts
from specengine.layers.linear import PLAIN_TYPES, IncomingWeight, Linear, MergedLinear
from specengine.layers.moves import Plan
from specengine.layers.norm import Norm
from specengine.layers.row_order import has_rows

PackedModules = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class CutPlace:
    """A parameter of this rank, which a part of a checkpoint's tensor fills. Where that is nothing,
    zeros do."""

    tensor: Tensor
    cut: AnyCut

    @property
    def shape(self) -> torch.Size:
        """The shape of the checkpoint's tensor."""
        shape = list(self.tensor.shape)
        shape[self.cut.dim] = self.cut.whole
        return torch.Size(shape)

    def parts(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of this rank's parameter, view of what fills it). whole: the checkpoint's tensor.
        None where this rank has nothing of it."""
        dim, ranges = self.cut.dim, [one for one in self.cut.ranges if one.size]
        places = torch.split(self.tensor, [one.size for one in ranges], dim) if ranges else ()
        for place, one in zip(places, ranges, strict=True):
            yield place, whole.narrow(dim, one.start, one.size)

    def copy_(self, whole: Tensor) -> None:
        if not self.cut.size:
            self.tensor.zero_()
        for place, part in self.parts(whole):
            place.copy_(part)


# A parameter, or what collects the tensors that stand for one in a quantised checkpoint.
Place = Tensor | CutPlace | IncomingWeight

# Tables that old checkpoints carry and every model computes for itself.
_COMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")

# What a tensor holds is its weights. Others are of quantised checkpoints, FP8 among them: floating
# point, and wrong by their scales.
_WEIGHTS = PLAIN_TYPES


def load_weights(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    packed_modules_mapping: PackedModules,
    ignored: Sequence[str] = (),
) -> None:
    """Copy each (checkpoint name, tensor) to its parameter; each must be filled exactly. Merged
    modules may be merged in the checkpoint too.

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
    weights = cut_experts(weights)
    for name, tensor in weights:
        path, _, kind = name.rpartition(".")
        if path not in merged:
            yield name, tensor
            continue
        if merged[path].incoming is not None and not has_rows(kind, tensor):
            merged[path].take_merged(name, tensor)
            continue
        parent, _, leaf = path.rpartition(".")
        sizes = merged[path].whole_sizes
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


def fill_places(
    places: Mapping[str, Place],
    weights: Iterable[tuple[str, Tensor]],
    model_name: str,
    ignored: Sequence[str] = (),
) -> None:
    """`load_weights` for parameters that the caller has named: checkpoint name -> parameter. What
    lies in files is read when all names and shapes are known to fit (layers/moves.py)."""
    missing, ignored, plan = set(places), tuple(ignored), Plan()
    for name, tensor in weights:
        if name.startswith(ignored) or name.endswith(_COMPUTED):
            continue
        weight_name = name.rpartition(".")[0] + ".weight"
        # A bias, or a router's correction, is a parameter beside a weight that is collected.
        is_own = name in places and not isinstance(places[name], IncomingWeight)
        collector = None if is_own or name.endswith(".bias") else places.get(weight_name)
        if isinstance(collector, IncomingWeight):
            collector.take(name, plan.moved(name, tensor, collector.device))
            missing.discard(weight_name)
            continue
        if name not in places:
            if _is_empty_bias(name, tensor, places.get(weight_name)):
                continue
            raise ModelLoadError(
                f"unexpected tensor {name} {list(tensor.shape)}: {model_name} has no such "
                "parameter; config.json and weights do not belong together"
            )
        if name not in missing:
            raise ModelLoadError(
                f"tensor {name} comes twice: several files hold it, or it is there both merged and "
                "split; which of them is meant is not known"
            )
        _put(name, tensor, places[name], plan)
        missing.discard(name)
    missing = {name for name in missing if not _came_merged(places[name])}
    if missing:
        raise ModelLoadError(_missing_message(sorted(missing)))
    plan.carry_out()


def _is_empty_bias(name: str, tensor: Tensor, weight: Place | None) -> bool:
    """Whether a tensor is a bias of zeros, of a quantised layer that the model has without: writers
    of GPTQ give every layer one."""
    return name.endswith(".bias") and isinstance(weight, IncomingWeight) and not tensor.any()


def _came_merged(place: Place) -> bool:
    return isinstance(place, IncomingWeight) and place.came_merged


def weight_places(model: nn.Module, packed: PackedModules) -> dict[str, Place]:
    """Checkpoint name -> the parameter, or the part of a merged one, that it fills. A parameter
    that two modules share is filled under its first name."""
    places: dict[str, Place] = {}
    shared: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            incoming = module.incoming or {}
            for name, view, cut in module.named_shards():
                places[f"{path}.{name}"] = incoming.get(name) or cut_place(view, cut)
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shared:
                continue
            shared.add(id(parameter))
            found = module_places(module, kind, parameter)
            if isinstance(module, MergedLinear):
                parent, _, leaf = path.rpartition(".")
                parts = zip(packed[leaf], found, strict=True)
                places |= {f"{parent}.{part}.{kind}": place for part, place in parts}
            else:
                places[f"{path}.{kind}"] = found[0]
    return places


def module_places(module: nn.Module, kind: str, parameter: Tensor) -> Sequence[Place]:
    """Places in one parameter of a module, by the checkpoint's tensors that fill it: one, or one a
    merged layer. A module that ranks share declares in `cuts` what this rank has of each."""
    if kind == "weight" and isinstance(module, Linear) and module.incoming is not None:
        return module.incoming
    if isinstance(module, Experts):
        return [cut_place(*module.whole_view(kind, parameter))]
    views = module.shards(parameter) if isinstance(module, MergedLinear) else [parameter]
    cuts_of: Any = getattr(module, "cuts", None)
    cuts = [None] * len(views) if cuts_of is None else cuts_of(kind)
    return [cut_place(view, cut) for view, cut in zip(views, cuts, strict=True)]


def cut_place(view: Tensor, cut: AnyCut | None) -> Tensor | CutPlace:
    return view if cut is None or cut.size == cut.whole else CutPlace(view, cut)


def _put(name: str, tensor: Tensor, place: Place, plan: Plan) -> None:
    assert not isinstance(place, IncomingWeight), "a collector takes all tensors of its layer"
    if tensor.dtype not in _WEIGHTS:
        raise ModelLoadError(
            f"tensor {name} has type {tensor.dtype}, and config.json names no quantisation of it; "
            "without its scales it is no weight"
        )
    if tensor.shape != place.shape:
        raise ModelLoadError(
            f"tensor {name} has shape {list(tensor.shape)}, the model needs {list(place.shape)}"
        )
    if isinstance(place, Tensor):
        plan.add(name, place, tensor)
    elif not place.cut.size:
        place.tensor.zero_()
    else:
        for own, part in place.parts(tensor):
            plan.add(name, own, part)


def _missing_message(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"missing tensor {shown}{more}: the checkpoint is incomplete or of another model"
