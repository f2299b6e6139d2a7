"""Forwards in pieces on a CPU, beside eager ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.platform import platform_of
from specengine.layers.attention import attention_layers
from specengine.runner.memory.graph_memory import GraphMemory
from specengine.runner.piecewise.forwards import PiecewiseForwards, PiecewiseOptions


class MiniContext:
    """A runner.context.ForwardContext of a model and feature layers alone."""

    device = torch.device("cpu")

    def __init__(self, model: Any, feature_layers: tuple[int, ...] = ()) -> None:
        self.model = model
        self.graph_memory = GraphMemory(platform=platform_of(self.device))
        self.batch_fields = {"feature_layers": feature_layers}
        self.attn_layers = attention_layers(model)

    def guard_of(self, **owners: object) -> None:
        return None


def pieces_of(
    model: Any, sizes: tuple[int, ...], feature_layers: tuple[int, ...] = (), **options: Any
) -> PiecewiseForwards:
    context: Any = MiniContext(model, feature_layers)
    return PiecewiseForwards(context, PiecewiseOptions(sizes, **options))


def in_pieces(pieces: PiecewiseForwards, batch: ForwardBatch) -> Tensor:
    """[T, H], and the features are left on the batch."""
    with torch.inference_mode():
        hidden = pieces.run(batch)
    assert hidden is not None
    return hidden
