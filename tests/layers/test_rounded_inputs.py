"""Layers tell the norm or activation before a product which form it rounds its input to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.kernels.linear.activation import act_and_mul
from specengine.kernels.linear.norm import fused_add_rms_norm, rms_norm
from specengine.kernels.linear.quantised import Fp8Input, Fp8Weight
from specengine.layers import linear, mlp, norm
from specengine.layers.attention import Attention
from specengine.layers.decoder import DecoderLayer
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.linear import Linear
from specengine.layers.quantization.linears import QuantisedLinear
from specengine.layers.rotary import RotaryEmbedding

FORM = Fp8Input()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Fp8Input | None]]:
    """Of each operation that could round: its name, and what it was asked for."""
    found: list[tuple[str, Fp8Input | None]] = []

    def spied(operation: Any) -> Any:
        def run(*given: Any, into: Fp8Input | None = None, **_: bool) -> Any:
            found.append((operation.__name__, into))
            return operation(*given)

        return run

    monkeypatch.setattr(norm, "rms_norm", spied(rms_norm))
    monkeypatch.setattr(norm, "fused_add_rms_norm", spied(fused_add_rms_norm))
    monkeypatch.setattr(mlp, "act_and_mul", spied(act_and_mul))
    return found


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> DecoderLayer:
    def queries(self: Attention, positions: Tensor, q: Tensor, *_: object) -> Tensor:
        return q

    monkeypatch.setattr(Attention, "forward", queries)
    rotary = RotaryEmbedding(8, 64, {"rope_type": "default", "rope_theta": 1e4})
    made = DecoderLayer(LayerSpec(*(32, 48, 4, 2, 8, 1e-5)), 0, rotary)
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def quantise(layer: DecoderLayer) -> None:
    for one in layer.modules():
        if isinstance(one, Linear):
            kernel = QuantisedLinear([Fp8Weight.of(one.plain)], one.bias)
            one.use_kernel(kernel, kernel.takes)


def run(layer: DecoderLayer, residual: Tensor | None) -> None:
    batch = cast(ForwardBatch, SimpleNamespace(compiles=False))
    with torch.inference_mode():
        layer(torch.arange(3), torch.randn(3, 32), residual, batch)


def test_each_norm_and_the_activation_of_an_fp8_layer_are_asked_to_round(
    layer: DecoderLayer, asked: list[tuple[str, Fp8Input | None]]
) -> None:
    quantise(layer)
    run(layer, None)
    assert asked == [("rms_norm", FORM), ("fused_add_rms_norm", FORM), ("act_and_mul", FORM)]
    asked.clear()
    run(layer, torch.randn(3, 32))
    assert asked[0] == ("fused_add_rms_norm", FORM)


def test_nothing_of_a_plain_layer_is_asked_to_round(
    layer: DecoderLayer, asked: list[tuple[str, Fp8Input | None]]
) -> None:
    run(layer, torch.randn(3, 32))
    assert len(asked) == 3
    assert all(into is None for _, into in asked)


def test_nothing_is_rounded_ahead_in_a_trace(
    layer: DecoderLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantise(layer)
    assert layer.attention.takes == layer.mlp.takes == FORM
    monkeypatch.setattr(linear, "is_traced", lambda: True)
    assert layer.attention.takes is None
    assert layer.mlp.takes is None


def test_products_side_by_side_ask_for_no_form() -> None:
    one = Fp8Weight.of(torch.ones(4, 8))
    assert QuantisedLinear([one], None).takes == FORM
    assert QuantisedLinear([one, torch.ones(4, 8)], None).takes is None
    assert QuantisedLinear([torch.ones(4, 8)], None).takes is None
