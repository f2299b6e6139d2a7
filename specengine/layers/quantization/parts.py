"""One product's weight, from a checkpoint's tensors to what this rank multiplies with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from specengine.core.errors import ConfigError
from specengine.core.parallel import Cut
from specengine.core.registry import LINEAR_FORMATS, load_place
from specengine.kernels.linear.linear_format import LinearFormat, QuantisedWeight
from specengine.layers.quantization.method import ROW_ORDER, LayerTensors, Quantization

Part = QuantisedWeight | Tensor


def format_of(part: Part) -> LinearFormat:
    """The entry of LINEAR_FORMATS that holds the part."""
    return _format_of_type(type(part))


@cache
def _format_of_type(kind: type) -> LinearFormat:
    for place in LINEAR_FORMATS.values():
        found: LinearFormat = load_place(place)
        if issubclass(kind, found.holds):
            return found
    raise TypeError(f"no entry of LINEAR_FORMATS (core/registry.py) holds {kind.__name__}; add one")


def read_part(layer: LayerTensors, method: Quantization, dtype: torch.dtype, keeps: bool) -> Part:
    order = layer.tensors.pop(ROW_ORDER, None)
    if not layer.is_plain:
        made = method.read(layer)
        layer.finish()
        return made if order is None else _take_rows(made, order, layer)
    weight = layer.shaped("weight", layer.rows, layer.columns)
    layer.finish()
    encoded = None if keeps else method.encode(weight)
    return weight.to(dtype) if encoded is None else encoded


def _take_rows(made: QuantisedWeight, order: Tensor, layer: LayerTensors) -> QuantisedWeight:
    found = format_of(made)
    if found.take_rows is None:
        raise layer.refused(f"is {found.title}, whose rows are not reordered")
    return found.take_rows(made, order)


def own_part(whole: Part, cut: Cut | None, name: str) -> Part:
    """This rank's. Raises ConfigError where it would cut what has one scale."""
    if cut is None or cut.size == cut.whole:
        return whole
    if isinstance(whole, Tensor):
        return whole.narrow(cut.dim, cut.start, cut.size).contiguous()
    found = whole.narrow(cut.dim, cut.start, cut.size)
    if found is None:
        raise ConfigError(
            f"--tp-size, or --dp-size with shared experts: inputs {cut.start} to {cut.stop} of "
            f"{name} begin or end amid a group that has one scale, are in another order, or are "
            "no multiple of 32; take fewer ranks, or the model in floating point"
        )
    return found


def join_parts(parts: Sequence[Part]) -> QuantisedWeight | None:
    """Weights of one input as one; None where they differ in more than their numbers, or are
    dense."""
    first, *others = map(format_of, parts)
    return first.join(parts) if all(one is first for one in others) else None


def dense(part: Part) -> Tensor:
    return part if isinstance(part, Tensor) else part.dequantised()
