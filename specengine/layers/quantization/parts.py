"""One product's weight, from a checkpoint's tensors to what this rank multiplies with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specengine.core.errors import ConfigError
from specengine.core.parallel import Cut
from specengine.kernels.linear.mxfp4 import Mxfp4Weight, join_mxfp4
from specengine.kernels.linear.quantised import Fp8Weight, IntWeight, join_fp8, join_int
from specengine.layers.quantization.method import (
    ROW_ORDER,
    LayerTensors,
    QuantisedWeight,
    Quantization,
)

Part = QuantisedWeight | Tensor


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
    if isinstance(made, Mxfp4Weight):
        raise layer.refused("is MXFP4, whose rows are not reordered")
    return made.take_rows(order)


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
            f"{name} begin or end amid a group that has one scale, stand in another order, or are "
            "no multiple of 32; take fewer ranks, or the model in floating point"
        )
    return found


def join_parts(parts: Sequence[Part]) -> QuantisedWeight | None:
    """Weights of one input as one; None where they differ in more than their numbers, or are
    dense."""
    if all(isinstance(one, Fp8Weight) for one in parts):
        return join_fp8([one for one in parts if isinstance(one, Fp8Weight)])
    if all(isinstance(one, IntWeight) for one in parts):
        return join_int([one for one in parts if isinstance(one, IntWeight)])
    if all(isinstance(one, Mxfp4Weight) for one in parts):
        return join_mxfp4([one for one in parts if isinstance(one, Mxfp4Weight)])
    return None


def dense(part: Part) -> Tensor:
    return part if isinstance(part, Tensor) else part.dequantised()
