"""Layers tell a norm that what reads its rows waits by itself, and so may start at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor, nn

from specengine.core.batch import ForwardBatch
from specengine.kernels.linear.norm import fused_add_rms_norm, rms_norm
from specengine.kernels.linear.quantised import Fp8Weight, IntWeight
from specengine.layers import linear, norm
from specengine.layers.attention import Attention
from specengine.layers.decoder import DecoderLayer
from specengine.layers.gated_delta import GatedDelta
from specengine.layers.layer_spec import ExpertsSpec, GatedDeltaSpec, LayerSpec
from specengine.layers.linear import Linear
from specengine.layers.quantization.linears import QuantisedLinear
from specengine.layers.quantization.parts import Part
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.sparse_mlp import SparseMLP
from tests.layers.test_quantization import read, weight_of
from tests.support.quantised import FORMATS

LayerT = TypeVar("LayerT", bound=nn.Module)
FOUR_BITS = {
    *("compressed w4a16", "compressed w4a16 rows", "compressed w4a16 asymmetric"),
    *("awq", "gptq", "gptq asymmetric", "gptq v2"),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each norm that adds to the stream: whether its rows are awaited."""
    found: list[bool] = []

    def spied(operation: Any) -> Any:
        def run(*given: Any, awaited: bool = False, **others: Any) -> Any:
            found.append(awaited)
            return operation(*given, **others)

        return run

    monkeypatch.setattr(norm, "rms_norm", spied(rms_norm))
    monkeypatch.setattr(norm, "fused_add_rms_norm", spied(fused_add_rms_norm))
    return found


def int_weight(weight: Tensor, bits: int = 4) -> IntWeight:
    codes = torch.randint(0, 1 << bits, weight.shape, dtype=torch.uint8)
    return IntWeight.pack(codes, torch.rand(len(weight), weight.shape[1] // 16) / 20, None, bits)


def made(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> DecoderLayer:
    def queries(self: Attention, positions: Tensor, q: Tensor, *_: object) -> Tensor:
        return q

    monkeypatch.setattr(Attention, "forward", queries)
    rotary = RotaryEmbedding(8, 64, {"rope_type": "default", "rope_theta": 1e4})
    layer = DecoderLayer(LayerSpec(*(32, 64, 4, 2, 8, 1e-5), **fields), 0, rotary)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def quantise(product: Linear, *parts: Part) -> None:
    kernel = QuantisedLinear(parts, product.bias)
    product.use_kernel(kernel, kernel.takes)


def in_4_bits(layer: LayerT) -> LayerT:
    for one in layer.modules():
        if isinstance(one, Linear):
            quantise(one, int_weight(one.plain))
    return layer


def run(layer: DecoderLayer, residual: Tensor | None) -> None:
    batch = cast(ForwardBatch, SimpleNamespace(compiles=False))
    with torch.inference_mode():
        layer(torch.arange(3), torch.randn(3, 32), residual, batch)


@pytest.mark.parametrize("name", FORMATS)
def test_products_with_4_bit_weights_in_their_own_order_alone_wait(name: str) -> None:
    """Of each format that a registered method reads (test_quantization.py)."""
    form = FORMATS[name]
    weight = read(form, form.pack(weight_of(64, 64)).tensors, 64, 64)
    assert QuantisedLinear([weight], None).waits == (name in FOUR_BITS)


def test_products_side_by_side_and_plain_ones_do_not() -> None:
    four, plain = int_weight(torch.ones(4, 32)), torch.ones(4, 32)
    assert QuantisedLinear([four], None).waits
    assert not QuantisedLinear([four, four], None).waits
    assert not QuantisedLinear([four, plain], None).waits
    assert not QuantisedLinear([plain], None).waits


def test_a_kernel_that_says_nothing_is_not_waited_for() -> None:
    product = Linear(16, 4)
    assert not product.waits
    product.use_kernel(lambda x: x)
    assert not product.waits


@pytest.mark.parametrize("residual", [None, torch.zeros(3, 32)], ids=["first", "later"])
def test_both_norms_of_a_layer_of_4_bits_are_awaited(
    residual: Tensor | None, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = in_4_bits(made(monkeypatch))
    run(layer, residual)
    assert asked == [True, True]


def test_each_norm_is_told_of_its_own_reader(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = in_4_bits(made(monkeypatch))
    gate_up = layer.gated_mlp.gate_up_proj
    for parts in ([torch.zeros(128, 32)], [Fp8Weight.of(torch.ones(128, 32))]):
        quantise(gate_up, *parts)
        run(layer, None)
    quantise(gate_up, int_weight(torch.ones(128, 32)))
    quantise(layer.self_attn.qkv_proj, int_weight(torch.ones(64, 32), 8))
    run(layer, None)
    assert asked == [True, False, True, False, False, True]


def test_no_norm_of_a_plain_layer_is_awaited(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(made(monkeypatch), None)
    assert asked == [False, False]


@pytest.mark.parametrize("places", ["shared", "parallel"])
def test_rows_with_a_second_reader_are_not_awaited(
    places: str, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = in_4_bits(made(monkeypatch, norm_places=places))
    assert layer.attention.waits
    run(layer, None)
    assert not any(asked)


def test_experts_and_linear_attention_do_not_wait() -> None:
    """Routers and gates, which read the rows as well, are other kernels."""
    spec = LayerSpec(32, 64, 4, 2, 8, 1e-5, gated_delta=GatedDeltaSpec(2, 4, 8, 8, 4))
    delta, sparse = GatedDelta(spec, 0), SparseMLP(32, ExpertsSpec(4, 2, 16, shared_size=32))
    for layer in (in_4_bits(delta), in_4_bits(sparse)):
        assert any(one.waits for one in layer.modules() if isinstance(one, Linear))
        assert not layer.waits


def test_nothing_is_awaited_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = in_4_bits(made(monkeypatch))
    assert layer.attention.waits
    assert layer.mlp.waits
    monkeypatch.setattr(linear, "is_traced", lambda: True)
    assert not layer.attention.waits
    assert not layer.mlp.waits
