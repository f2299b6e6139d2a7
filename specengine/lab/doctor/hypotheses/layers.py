"""Features from other layers of the target than the drafter was trained on, or in another order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations, pairwise, permutations

import torch

from specengine.lab.doctor.examined_drafter import ExaminedDrafter
from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.hypotheses.layer_fields import FIELDS, LayerFields, Layers
from specengine.lab.doctor.hypothesis import Hypothesis, Trial

_MOST_PERMUTED = 3  # layers whose features are tried in every order


def hypotheses(drafter: ExaminedDrafter, trial: Trial) -> Iterator[Hypothesis]:
    fields = FIELDS.get(drafter.algorithm)
    if fields is None:
        return
    current = fields.stated(trial.files, drafter.num_layers)
    for layers, reason in _candidates(fields, current, drafter.num_layers):
        if _is_possible(layers, drafter.num_layers) and layers != current:
            yield Hypothesis(
                "layer ids",
                f"features are the outputs of layers {list(layers)}, counted from 0: {reason}",
                f"config.json: set {fields.remedy(trial.files, layers)}",
                partial(fields.with_layers, layers=layers),
            )
    yield from _orders(trial.files, len(current))


def _candidates(
    fields: LayerFields, current: Layers, num_layers: int
) -> Iterator[tuple[Layers, str]]:
    yield _shifted(current, -1), fields.fewer
    yield _shifted(current, 1), fields.more
    yield fields.usual(num_layers), "the usual ones"
    for index, layer in enumerate(current):
        for step in (-1, 1):
            moved = (*current[:index], layer + step, *current[index + 1 :])
            yield moved, f"id {layer} should be {layer + step}"


def _shifted(layers: Layers, step: int) -> Layers:
    return tuple(layer + step for layer in layers)


def _is_possible(layers: Layers, num_layers: int) -> bool:
    ascending = all(low < high for low, high in pairwise(layers))
    return bool(layers) and ascending and layers[0] >= 0 and layers[-1] < num_layers


def _orders(files: DraftFiles, count: int) -> Iterator[Hypothesis]:
    weight = files.get("fc.weight")
    if weight is None or count < 2 or weight.shape[1] % count:
        return
    for order in _other_orders(count):
        blocks = weight.chunk(count, dim=1)
        joined = torch.cat([blocks[order.index(place)] for place in range(count)], dim=1)
        yield Hypothesis(
            "feature order",
            f"fc joins the features of the layers in the order {list(order)}, not ascending",
            "fc.weight: reorder its column blocks so that features ascend (--write-fixed does it)",
            partial(DraftFiles.with_tensors, edited={"fc.weight": joined}),
        )


def _other_orders(count: int) -> list[Layers]:
    """All of few layers; of more, the reverse and exchanges of two: each is a draft to load."""
    ascending = tuple(range(count))
    if count <= _MOST_PERMUTED:
        return list(permutations(ascending))[1:]
    orders = [ascending[::-1]]
    for one, other in combinations(ascending, 2):
        exchanged = {one: other, other: one}
        orders.append(tuple(exchanged.get(place, place) for place in ascending))
    return orders
