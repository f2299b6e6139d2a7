from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.kernels.native import linear as native
from specengine.layers.linear import Linear, LMHead, MergedLinear
from specengine.layers.linear_cpu import (
    Int4Linear,
    Int8Linear,
    MklLinear,
    NativeLinear,
    OneDnnLinear,
    pack_linears,
    quantize_int4,
)

ROWS = [0, 1, 2, 3, 7, 16, 17, 65, 513]


def _filled(layer: Linear, dtype: torch.dtype = torch.float32) -> Linear:
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=generator)
    return layer.to(dtype)


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(576, 960), (40, 24), (7, 3)])
def test_mkl_multiplies_any_number_of_rows(sizes: tuple[int, int], bias: bool) -> None:
    layer = _filled(Linear(*sizes, bias=bias))
    x = torch.randn(max(ROWS), sizes[0])
    assert layer.weight is not None
    weight = layer.weight.detach().clone()
    expected = F.linear(x.double(), weight.double(), layer.bias.double() if bias else None)  # type: ignore[union-attr]
    pack_linears(layer, None)
    assert isinstance(layer.kernel, MklLinear)
    for rows in ROWS:
        torch.testing.assert_close(layer(x[:rows]).double(), expected[:rows], rtol=1e-4, atol=1e-4)


def test_mkl_takes_strided_rows() -> None:
    layer = _filled(Linear(64, 48))
    x = torch.randn(10, 128)[::2, :64]
    expected = layer(x)
    pack_linears(layer, None)
    torch.testing.assert_close(layer(x), expected)


needs_compiler = pytest.mark.skipif(
    not native.fits(torch.empty(32, 1)), reason="no C compiler, or no AVX-512"
)


@needs_compiler
@pytest.mark.parametrize("bias", [False, True])
def test_float32_with_bfloat16_numbers_loses_nothing(bias: bool) -> None:
    """And a row has the same bits, however many stand beside it."""
    layer = _filled(_filled(Linear(97, 96, bias=bias)), torch.bfloat16).float()
    x = torch.randn(max(ROWS), 97)
    expected = layer.double()(x.double())
    pack_linears(layer.float(), None)
    assert isinstance(layer.kernel, NativeLinear)
    found = layer(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), found[:rows])


@pytest.mark.parametrize("reason", ["no compiler", "no AVX-512", "odd outputs", "finer numbers"])
def test_other_float32_weights_are_left_to_mkl(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "no compiler":
        monkeypatch.setattr("specengine.kernels.native.linear.library", lambda name: None)
    if reason == "no AVX-512":
        monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: False)
    layer = _filled(Linear(40, 48 if reason == "odd outputs" else 64))
    if reason != "finer numbers":
        layer = layer.to(torch.bfloat16).float()
    x = torch.randn(5, 40)
    expected = layer(x)
    pack_linears(layer, None)
    assert isinstance(layer.kernel, MklLinear)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16_is_multiplied_in_panels(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    layer = _filled(Linear(97, 96, bias=bias), torch.bfloat16)
    x = torch.randn(21, 97, dtype=torch.bfloat16)
    expected = layer.float()(x.float()).to(torch.bfloat16)
    pack_linears(layer.to(torch.bfloat16), None)
    assert isinstance(layer.kernel, NativeLinear)
    found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
    for rows in range(len(x)):
        assert torch.equal(layer(x[:rows]), found[:rows])


def test_bfloat16_instructions_are_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    layer = _filled(Linear(64, 48, bias=True), torch.bfloat16)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    expected = layer(x).float()
    pack_linears(layer, None)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert isinstance(layer.kernel, OneDnnLinear)
    assert _relative(layer(x), expected) < 0.01


def test_packing_lets_go_of_the_plain_weight() -> None:
    model = nn.Sequential(_filled(Linear(32, 32)), _filled(Linear(32, 32)))
    pack_linears(model, None)
    assert list(model.parameters()) == []


@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.01), ("int4", 0.12)])
@pytest.mark.parametrize("bias", [False, True])
def test_weight_only_quantization_is_near(quantization: str, error: float, bias: bool) -> None:
    layer = _filled(MergedLinear(128, [64, 16, 16], bias=bias), torch.bfloat16)
    x = torch.randn(9, 128, dtype=torch.bfloat16)
    expected = layer(x).float()
    pack_linears(layer, quantization)
    found = layer(x)
    assert found.dtype == torch.bfloat16
    assert 0 < _relative(found, expected) < error
    rows = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(rows, found)


def test_int4_keeps_weights_that_were_on_such_a_grid() -> None:
    codes = torch.randint(0, 16, (32, 4, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    scale = torch.randint(1, 9, (32, 4, 1)) / 64
    low = torch.randint(-64, 0, (32, 4, 1)) / 64
    weight = (codes * scale + low).reshape(32, 128).to(torch.bfloat16)
    found = quantize_int4(weight, 32)[0]
    assert torch.equal(found, codes.reshape(32, 128).to(torch.int32))
    kernel = Int4Linear(weight, None, 32)
    eye = torch.eye(128, dtype=torch.bfloat16)
    torch.testing.assert_close(kernel(eye).t().float(), weight.float(), rtol=0, atol=2**-8)


def test_int4_of_equal_weights_is_exact() -> None:
    weight = torch.full((16, 32), 0.375, dtype=torch.bfloat16)
    out = Int4Linear(weight, None, 32)(torch.eye(32, dtype=torch.bfloat16))
    torch.testing.assert_close(out, weight.t())


def test_group_size_is_configurable() -> None:
    layer = _filled(Linear(128, 32), torch.bfloat16)
    pack_linears(layer, "int4", group_size=64)
    assert isinstance(layer.kernel, Int4Linear)
    assert layer.kernel.scale_middle.shape == (2, 32, 2)


def test_head_and_odd_layers_stay_in_int8_under_int4() -> None:
    model = nn.ModuleDict({"head": LMHead(64, 32), "odd": Linear(48, 24), "plain": Linear(64, 32)})
    for layer in model.values():
        _filled(layer.to(torch.bfloat16), torch.bfloat16)  # type: ignore[arg-type]
    pack_linears(model, "int4")
    kinds = {name: type(layer.kernel) for name, layer in model.items()}
    assert kinds == {"head": Int8Linear, "odd": Int8Linear, "plain": Int4Linear}


def test_quantization_needs_bfloat16() -> None:
    with pytest.raises(ConfigError, match="--dtype bfloat16"):
        pack_linears(_filled(Linear(32, 32)), "int8")


def test_inputs_that_int8_cannot_take_are_refused_by_name() -> None:
    model = nn.ModuleDict({"narrow": _filled(Linear(24, 32), torch.bfloat16)})
    with pytest.raises(ModelLoadError, match="narrow has 24 inputs"):
        pack_linears(model, "int8")
