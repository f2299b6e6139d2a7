"""Features from other layers of the target than the drafter was trained on, or in another order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, permutations
from typing import Any

import torch

from specengine.core.errors import ModelLoadError
from specengine.draft.eagle.checkpoint import EagleCheckpoint
from specengine.lab.doctor.examined_drafter import ExaminedDrafter
from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.hypothesis import Hypothesis, Trial

_IDS = "eagle_aux_hidden_state_layer_ids"
Layers = tuple[int, ...]


def hypotheses(drafter: ExaminedDrafter, trial: Trial) -> Iterator[Hypothesis]:
    if drafter.algorithm != "EAGLE3":
        return
    current = _stated(trial.files, drafter.num_layers)
    for layers, reason in _candidates(current, drafter.num_layers):
        if _is_possible(layers, drafter.num_layers) and layers != current:
            yield Hypothesis(
                "layer ids",
                f"features are the outputs of layers {list(layers)}, counted from 0: {reason}",
                f"config.json: set {_remedy(trial.files, layers)}",
                partial(_with_layers, layers=layers),
            )
    yield from _orders(trial.files, len(current))


def _stated(files: DraftFiles, num_layers: int) -> Layers:
    """What the configuration says, possible or not."""
    checkpoint = EagleCheckpoint(files.directory.name, files.raw)
    try:
        return checkpoint.feature_layers(num_layers)
    except ModelLoadError:
        own, shared = checkpoint.eagle_config.get(_IDS), files.raw.get(_IDS) or []
        return tuple(own) if own is not None else tuple(layer - 1 for layer in shared)


def _candidates(current: Layers, num_layers: int) -> Iterator[tuple[Layers, str]]:
    yield _shifted(current, -1), "ids of vLLM's and speculators' counting under SGLang's key"
    yield _shifted(current, 1), "ids of SGLang's counting under vLLM's and speculators' key"
    yield (1, num_layers // 2 - 1, num_layers - 4), "the usual ones"
    for index, layer in enumerate(current):
        for step in (-1, 1):
            moved = (*current[:index], layer + step, *current[index + 1 :])
            yield moved, f"id {layer} should be {layer + step}"


def _shifted(layers: Layers, step: int) -> Layers:
    return tuple(layer + step for layer in layers)


def _is_possible(layers: Layers, num_layers: int) -> bool:
    ascending = all(low < high for low, high in pairwise(layers))
    return bool(layers) and ascending and layers[0] >= 0 and layers[-1] < num_layers


def _counts_as_vllm(files: DraftFiles) -> bool:
    is_nested = _IDS in (files.raw.get("eagle_config") or {})
    return not is_nested and files.raw.get(_IDS) is not None


def _with_layers(files: DraftFiles, layers: Layers) -> DraftFiles:
    """In the layout that the file has."""
    edited: dict[str, Any] = {}
    if files.raw.get(_IDS) is not None:
        edited[_IDS] = [layer + 1 for layer in layers]
    if not _counts_as_vllm(files):
        edited["eagle_config"] = {**(files.raw.get("eagle_config") or {}), _IDS: list(layers)}
    return files.with_config(**edited)


def _remedy(files: DraftFiles, layers: Layers) -> str:
    nested = f"eagle_config.{_IDS} to {list(layers)}"
    if files.raw.get(_IDS) is None:
        return nested
    shared = f"{_IDS}, which counts inputs as vLLM does, to {[layer + 1 for layer in layers]}"
    return shared if _counts_as_vllm(files) else f"{nested}, and {shared}"


def _orders(files: DraftFiles, count: int) -> Iterator[Hypothesis]:
    weight = files.get("fc.weight")
    if weight is None or count < 2 or weight.shape[1] % count:
        return
    for order in list(permutations(range(count)))[1:]:
        blocks = weight.chunk(count, dim=1)
        joined = torch.cat([blocks[order.index(place)] for place in range(count)], dim=1)
        yield Hypothesis(
            "feature order",
            f"fc joins the features of the layers in the order {list(order)}, not ascending",
            "fc.weight: reorder its column blocks so that features ascend (--write-fixed does it)",
            partial(DraftFiles.with_tensors, edited={"fc.weight": joined}),
        )
