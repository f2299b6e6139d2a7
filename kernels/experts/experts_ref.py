"""Experts in plain PyTorch, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.types import Activation, Chosen, ExpertWeights

Product = Callable[[int, Tensor], Tensor]  # expert and rows [R, in] -> [R, out], bias included


def experts(x: Tensor, chosen: Chosen, weights: ExpertWeights | PackedExpertWeights) -> Tensor:
    gate_up = _product(weights.gate_up, weights.gate_up_bias)
    down = _product(weights.down, weights.down_bias)
    return by_expert(x, chosen, gate_up, down, weights.activation, weights.weighs_input)


def _product(weight: Tensor | PackedExperts, bias: Tensor | None) -> Product:
    def multiply(expert: int, rows: Tensor) -> Tensor:
        own = None if bias is None else bias[expert]
        if isinstance(weight, PackedExperts):
            return weight.product(rows, expert, own)
        return F.linear(rows, weight[expert], own)

    return multiply


def by_expert(
    x: Tensor,
    chosen: Chosen,
    gate_up: Product,
    down: Product,
    activation: Activation,
    weighs_input: bool,
) -> Tensor:
    """`experts` with any products: [T, H]. Waits for the device, to learn which were chosen."""
    (rows, width), count = x.shape, chosen.ids_TK.shape[1]
    parts_TKH = torch.empty(rows, count, width, dtype=torch.float32, device=x.device)
    for expert in sorted({*chosen.ids_TK.flatten().tolist()}):
        rows_S, places_S = torch.where(chosen.ids_TK == expert)
        weight = chosen.weights_TK[rows_S, places_S, None]
        given = x[rows_S]
        if weighs_input:
            given = (given * weight).to(x.dtype)
        out = down(expert, gated(gate_up(expert, given), activation)).float()
        parts_TKH[rows_S, places_S] = out if weighs_input else out * weight
    total = parts_TKH[:, 0]
    for place in range(1, count):
        total = total + parts_TKH[:, place]
    return total.to(x.dtype)


def gated(x: Tensor, activation: Activation) -> Tensor:
    """[T, 2 I], gate before up -> [T, I]."""
    gate, up = x.chunk(2, -1)
    if activation.name == "silu":
        return F.silu(gate) * up
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
