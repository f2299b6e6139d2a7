"""What requests leave in the state pool, as the layers of a model declare it."""

from __future__ import annotations

from typing import Any

import torch

from specengine.layers.gated_delta import delta_layers
from specengine.memory.state_pool import StatePool, StateShape, StateSizes


def state_shape_of(model: object) -> StateShape | None:
    """None: the model keeps no recurrent state. Raises ValueError where layers keep state of
    several forms, which one pool does not hold."""
    layers = delta_layers(model)
    if not layers:
        return None
    forms = {layer.kept for layer in layers}
    if len(forms) != 1:
        raise ValueError(f"one pool holds one form of state, and the layers have {forms}")
    ids = tuple(layer.layer_id for layer in layers)
    return StateShape(ids, forms.pop(), layers[0].norm.weight.dtype)


def make_states(model: Any, sizes: StateSizes, device: torch.device) -> StatePool | None:
    """None where the model keeps no recurrent state."""
    shape = state_shape_of(model)
    return None if shape is None else StatePool(shape, sizes, device)
