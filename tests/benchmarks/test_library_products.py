"""How weights are arranged for the libraries' kernels, which themselves need a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import library_products as products
from benchmarks.kernels.quantised import by_block
from specengine.kernels.linear.quantised import Fp8Weight

OUTS, INPUTS = 256, 384


@pytest.fixture
def weight() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(OUTS, INPUTS, dtype=torch.bfloat16)


def test_words_hold_eight_inputs_of_an_output(weight: torch.Tensor) -> None:
    codes, _ = products.rounded(weight)
    words = products.gptq_words(codes)
    assert words.shape == (INPUTS // 8, OUTS)
    assert words.dtype == torch.int32
    assert int(words.min()) < 0, "of some the last code is 8 or more"
    for place in range(8):
        assert torch.equal((words >> 4 * place) & 15, codes[:, place::8].T.int())


def test_four_bits_are_near_the_weight(weight: torch.Tensor) -> None:
    codes, scale = products.rounded(weight)
    assert (int(codes.min()), int(codes.max())) == (0, 15)
    steps = scale.float().repeat_interleave(products.GROUP, 1)
    difference = (products.dense_of(codes, scale).float() - weight.float()).abs()
    assert float((difference / steps).max()) < 0.6


def test_marlins_scales_are_squares_turned_over(weight: torch.Tensor) -> None:
    _, scale = products.rounded(weight)
    found = products.marlin_scales(scale)
    order = [first + 8 * then for first in range(8) for then in range(8)]
    for start in range(0, OUTS, 64):
        assert torch.equal(found[:, start : start + 64], scale.T[:, start : start + 64][:, order])


@pytest.mark.parametrize("form", ["row", "block"])
def test_columns_say_what_the_rows_say(form: str, weight: torch.Tensor) -> None:
    made, expected = {
        "row": (products.columns_by_row, Fp8Weight.of),
        "block": (products.columns_by_block, by_block),
    }[form]
    columns = made(weight)
    assert columns.codes.shape == (INPUTS, OUTS)
    assert columns.codes.stride() == (1, INPUTS), "a column after the other"
    assert torch.equal(columns.dequantised(), expected(weight).dequantised())


def test_a_library_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "find_spec", lambda _: None)
    products.vllm_ops.cache_clear()
    monkeypatch.setattr(products, "draw", lambda *size: torch.randn(*size))
    forms, found = products.usable(["marlin int4"], torch.randn(OUTS, INPUTS))
    assert not forms
    assert found == {"marlin int4": "ImportError: vllm is not installed"}
