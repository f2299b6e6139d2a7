"""Rows that norms and activations round for the FP8 product that reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specengine.kernels.linear import fp8_linear_ref, fp8_linear_triton
from specengine.kernels.linear.activation import act_and_mul
from specengine.kernels.linear.gated_norm import gated_norm
from specengine.kernels.linear.norm import fused_add_rms_norm, rms_norm, sum_add_rms_norm
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight
from specengine.kernels.linear.rounded import (
    NOT_ROUNDED,
    WHOLE_ROWS,
    found_beside,
    put_beside,
    rounding_of,
)
from specengine.kernels.linear.sigmoid_gate import sigmoid_gate
from specengine.kernels.linear.split_sum_triton import Tile

HIDDEN, EPS, FORM = 96, 1e-5, Fp8Input()
GROUPS = Fp8Input(group=32)
Maker = Callable[[Tensor, Tensor, Fp8Input | None], Tensor]


def normed(x: Tensor, gain: Tensor, into: Fp8Input | None) -> Tensor:
    return rms_norm(x, gain, EPS, into=into, backend="triton")


def added(x: Tensor, gain: Tensor, into: Fp8Input | None) -> Tensor:
    return fused_add_rms_norm(x, x.flip(0), gain, EPS, into=into, backend="triton")[0]


def summed(x: Tensor, gain: Tensor, into: Fp8Input | None) -> Tensor:
    parts = torch.stack([x, 0.5 * x.flip(0), x]).float()
    return sum_add_rms_norm(parts, x.flip(0), gain, EPS, into=into, backend="triton")[0]


def activated(x: Tensor, gain: Tensor, into: Fp8Input | None) -> Tensor:
    return act_and_mul(torch.cat([x, x * gain], 1), "silu", into=into, backend="triton")


def gated(x: Tensor, gain: Tensor, into: Fp8Input | None) -> Tensor:
    heads = x.float().view(len(x), 3, -1)
    return gated_norm(
        heads, heads.to(x.dtype).flip(0), gain[: heads.shape[2]], EPS, into=into, backend="triton"
    )


def scaled(x: Tensor, gain: Tensor, into: Fp8Input | None) -> Tensor:
    return sigmoid_gate(x, (x * gain).view(len(x), 3, -1), into=into, backend="triton")


@pytest.fixture(params=[normed, added, summed, activated, gated, scaled])
def maker(request: pytest.FixtureRequest) -> Maker:
    made: Maker = request.param
    return made


def draw(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(3, HIDDEN, generator=made)
    return x.to(device, dtype), (1 + 0.2 * torch.randn(HIDDEN, generator=made)).to(device, dtype)


@pytest.mark.parametrize("form", [FORM, GROUPS], ids=["row", "groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_rounded_as_their_product_would(
    maker: Maker, dtype: torch.dtype, form: Fp8Input, device: torch.device
) -> None:
    made = maker(*draw(device, dtype), form)
    kept = found_beside(made, form)
    assert kept is not None
    if device.type == "cuda":
        codes, scale = fp8_linear_triton.quantise_rows(made, form)
        assert torch.equal(kept[0].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(kept[1], scale)
        return
    codes, scale = fp8_linear_ref.quantise_rows(made, form)
    torch.testing.assert_close(kept[1], scale)
    # Triton's interpreter rounds 7.9 to 4 in FP8: it drops the carry into the exponent.
    mantissa, _ = codes.float().frexp()
    is_told = mantissa.abs() != 0.5
    different = kept[0].view(torch.uint8) != codes.view(torch.uint8)
    assert float(is_told.float().mean()) > 0.7
    assert float((different & is_told).float().mean()) < 0.01  # a division may round otherwise


def test_rows_themselves_do_not_change(maker: Maker, device: torch.device) -> None:
    given = draw(device, torch.float16)
    expected = maker(*given, None)
    assert torch.equal(maker(*given, FORM), expected)
    assert torch.equal(maker(*given, GROUPS), expected)


@pytest.mark.parametrize(
    "form", [None, Fp8Input(group=24), Fp8Input(group=64), Fp8Input(torch.tensor([0.1]))]
)
def test_other_forms_are_left_to_the_product(
    maker: Maker, form: Fp8Input | None, device: torch.device
) -> None:
    assert rounding_of(form, HIDDEN) == NOT_ROUNDED
    made = maker(*draw(device, torch.float32), form)
    assert found_beside(made, FORM) is None


def test_rows_wider_than_a_program_are_left_to_the_product() -> None:
    assert rounding_of(FORM, 32768) == WHOLE_ROWS
    assert rounding_of(FORM, 32769) == NOT_ROUNDED


def test_groups_of_padded_heads_are_left_to_the_product(device: torch.device) -> None:
    x = draw(device, torch.float32)[0].view(6, 2, 24)  # 24 is padded to 32
    form = Fp8Input(group=16)
    made = gated_norm(x, x, torch.ones(24, device=device), EPS, into=form, backend="triton")
    assert found_beside(made, form) is None


def test_what_stands_beside_rows_is_multiplied(device: torch.device) -> None:
    x = draw(device, torch.float32)[0]
    codes = torch.full(x.shape, 2.0, device=device).to(FP8)
    scale = torch.tensor([[1.0], [3.0], [0.5]], device=device)
    weight = Fp8Weight.of(torch.ones(32, HIDDEN, device=device))
    given = put_beside(x, codes, scale)
    out = fp8_linear_triton.fp8_linear(given, weight, None, Tile(32, 32, 1, 4, 2))
    torch.testing.assert_close(out, (2.0 * HIDDEN * scale).expand(3, 32))


def test_rows_of_a_published_scale_are_not_taken_for_rounded(device: torch.device) -> None:
    x = draw(device, torch.float32)[0]
    put_beside(x, x.to(FP8), torch.ones(3, 1, device=device))
    assert found_beside(x, Fp8Input(torch.tensor([0.1]))) is None
    assert found_beside(x.clone(), FORM) is None


def test_rows_rounded_by_groups_are_not_taken_for_whole_ones(device: torch.device) -> None:
    x = draw(device, torch.float32)[0]
    put_beside(x, x.to(FP8), torch.ones(3, 3, device=device))
    assert found_beside(x, FORM) is None
    assert found_beside(x, Fp8Input(group=16)) is None
    assert found_beside(x, GROUPS) is not None
