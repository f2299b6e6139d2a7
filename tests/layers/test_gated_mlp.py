"""Gate, up and their activation as one operation, where the weight has such a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.kernels.linear.activation import act_and_mul
from specengine.kernels.linear.int_linear import FORMAT, gated_int_linear
from specengine.kernels.linear.quantised import Fp8Input, Fp8Weight, IntWeight
from specengine.layers import mlp
from specengine.layers.linear import Linear
from specengine.layers.mlp import GatedMLP
from specengine.layers.quantization import linears
from specengine.layers.quantization.linears import QuantisedLinear
from specengine.layers.quantization.parts import Part, format_of

HIDDEN, INNER = 64, 96


@dataclass
class Asked:
    as_one: list[str] = field(default_factory=list)  # activations
    apart: list[Fp8Input | None] = field(default_factory=list)  # forms to round to


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()

    def one(x: Tensor, weight: IntWeight, activation: str, bias: Tensor | None) -> Tensor:
        found.as_one.append(activation)
        return gated_int_linear(x, weight, activation, bias)

    def activate(x: Tensor, activation: str, *, into: Any = None) -> Tensor:
        found.apart.append(into)
        return act_and_mul(x, activation)

    spied = replace(FORMAT, gated=one)
    monkeypatch.setattr(
        linears, "format_of", lambda part: spied if isinstance(part, IntWeight) else format_of(part)
    )
    monkeypatch.setattr(mlp, "act_and_mul", activate)
    torch.manual_seed(0)
    return found


def int_weight(rows: int, columns: int) -> IntWeight:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    return IntWeight.pack(codes, torch.rand(rows, columns // 32) / 20, None, 4)


def quantise(linear: Linear, *parts: Part) -> None:
    kernel = QuantisedLinear(parts, linear.bias)
    linear.use_kernel(kernel, kernel.takes)


def made(activation: str = "silu", bias: bool = False) -> GatedMLP:
    layer = GatedMLP(HIDDEN, INNER, bias, activation)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    quantise(layer.gate_up_proj, int_weight(2 * INNER, HIDDEN))
    return layer


@pytest.mark.parametrize(("activation", "bias"), [("silu", False), ("gelu_tanh", True)])
def test_product_by_integers_takes_the_activation_with_it(
    activation: str, bias: bool, asked: Asked
) -> None:
    layer, x = made(activation, bias), torch.randn(3, HIDDEN)
    expected = act_and_mul(layer.gate_up_proj.forward(x), activation)
    torch.testing.assert_close(layer.inner(x), expected)
    torch.testing.assert_close(layer.forward(x), layer.down_proj.forward(expected))
    assert asked == Asked([activation] * 2, [])


def test_rows_that_the_down_projection_rounds_are_made_apart(asked: Asked) -> None:
    layer, x = made(), torch.randn(3, HIDDEN)
    quantise(layer.down_proj, Fp8Weight.of(torch.randn(HIDDEN, INNER)))
    layer.inner(x)
    assert asked == Asked([], [Fp8Input()])


@pytest.mark.parametrize(
    "parts",
    [
        (int_weight(INNER, HIDDEN), torch.randn(INNER, HIDDEN)),
        (Fp8Weight.of(torch.randn(2 * INNER, HIDDEN)),),
    ],
    ids=["gate and up differ", "fp8"],
)
def test_products_of_other_weights_are_made_apart(parts: tuple[Part, ...], asked: Asked) -> None:
    layer = made()
    quantise(layer.gate_up_proj, *parts)
    layer.inner(torch.randn(3, HIDDEN))
    assert asked == Asked([], [None])


def test_plain_weights_are_made_apart(asked: Asked) -> None:
    layer = GatedMLP(HIDDEN, INNER)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.inner(torch.randn(3, HIDDEN))
    assert asked == Asked([], [None])
