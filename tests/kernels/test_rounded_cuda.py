"""Rows that are rounded to FP8 where they are made, in CUDA C++, on a GPU or on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from specengine.kernels.dispatch import Backend
from specengine.kernels.linear import fp8_linear_ref, rounded_cuda
from specengine.kernels.linear.activation import act_and_mul
from specengine.kernels.linear.fp8_linear import quantise_rows
from specengine.kernels.linear.norm import fused_add_rms_norm, rms_norm
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.linear.rounded import MOST_COLUMNS, found_beside, put_beside
from specengine.kernels.linear.rounded_cuda import RowForm, takes, takes_norm
from tests.kernels.cuda_places import PLACES, placed

EPS, FORM = 1e-5, Fp8Input()
Made = list[Tensor]
Maker = Callable[[Tensor, Backend], Made]


@pytest.fixture(autouse=True, params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return placed(request, monkeypatch, rounded_cuda)


def as_they_are(x: Tensor, backend: Backend) -> Made:
    return [put_beside(x.clone(), *quantise_rows(x, FORM, backend=backend))]


def activated(x: Tensor, backend: Backend) -> Made:
    return [act_and_mul(torch.cat([x, 2 * x.flip(1)], 1), "silu", into=FORM, backend=backend)]


def normed(x: Tensor, backend: Backend) -> Made:
    return [rms_norm(x, gain_of(x), EPS, into=FORM, backend=backend)]


def added(x: Tensor, backend: Backend) -> Made:
    return list(fused_add_rms_norm(x, 3 * x.flip(0), gain_of(x), EPS, into=FORM, backend=backend))


MAKERS = (as_they_are, activated, normed, added)


def gain_of(x: Tensor) -> Tensor:
    made = torch.Generator().manual_seed(1)
    return (1 + 0.2 * torch.randn(x.shape[1], generator=made)).to(x)


def draw(place: torch.device, rows: int, columns: int) -> Tensor:
    """A row of zeros, one of small numbers, and one with a few of another size, as of a model."""
    x = torch.randn(rows, columns, device=place)
    x[1] = 0
    x[2] *= 1e-4
    x[3, ::97] *= 300
    return x.bfloat16()


def codes_beside(x: Tensor) -> tuple[Tensor, Tensor]:
    kept = found_beside(x, FORM)
    assert kept is not None
    return kept[0].view(torch.uint8), kept[1]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("columns", [256, 1040, 2064, 4096])
def test_rows_equal_the_reference(maker: Maker, columns: int, place: torch.device) -> None:
    x = draw(place, 5, columns)
    found, expected = maker(x, "cuda"), maker(x, "torch")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.008, atol=0)  # a rounding to bfloat16
    codes, scale = codes_beside(found[0])
    exact, exact_scale = fp8_linear_ref.quantise_rows(found[0], FORM)
    torch.testing.assert_close(scale, exact_scale)
    different = codes != exact.view(torch.uint8)
    assert float(different.float().mean()) < 0.01  # a division rounds otherwise
    assert int((codes.int() - exact.view(torch.uint8).int()).abs().max()) <= 1


@pytest.mark.parametrize("rows", [5, 70])  # few, and too many to share blocks among each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("maker", "columns"),
    [
        *product((as_they_are, activated), (16, 528, 4096, 14336)),
        *product((normed, added), (256, 528, 2048, 2880, 4096)),
    ],
)
def test_bits_are_those_of_triton(
    maker: Maker, columns: int, dtype: torch.dtype, rows: int, place: torch.device
) -> None:
    if place.type == "cpu":
        pytest.skip("a property of the processor's divisions")
    x = draw(place, rows, columns).to(dtype)
    found, expected = maker(x, "cuda"), maker(x, "triton")
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(codes_beside(found[0]), codes_beside(expected[0]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_row_alone_has_the_bits_that_it_has_beside_others(
    maker: Maker, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded_cuda, "_FEW_ROWS", 4)
    monkeypatch.setattr(rounded_cuda, "_MOST_WARPS", 2)
    half = draw(place, 4, 1040)
    x = torch.cat([half, half.flip(0)])  # each is its own opposite, as `added` takes it
    assert RowForm.of(8, 1040) == RowForm(1, 2, 3)
    assert RowForm.of(4, 1040) == RowForm(8, 1)
    whole, alone = maker(x, "cuda"), maker(x[2:6], "cuda")
    for one, other in zip(whole, alone, strict=True):
        assert torch.equal(one[2:6], other)
    for one, other in zip(codes_beside(whole[0]), codes_beside(alone[0]), strict=True):
        assert torch.equal(one[2:6], other)


@pytest.mark.parametrize("form", [RowForm(1, 2, 3), RowForm(2, 3), RowForm(4, 2), RowForm(8, 1)])
def test_a_row_has_one_scale_in_all_forms(form: RowForm, place: torch.device) -> None:
    """Of widths that they do not divide."""
    x = draw(place, 5, form.columns - 48)
    found, expected = rounded_cuda.quantise_rows(x, form), rounded_cuda.quantise_rows(x)
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("columns", [16, 256, 4096, 8192, 14336, MOST_COLUMNS])
@pytest.mark.parametrize("rows", [1, 64, 65])
def test_a_row_fits_its_form(rows: int, columns: int) -> None:
    form = RowForm.of(rows, columns)
    assert columns <= form.columns
    assert form.warps <= 32


def test_what_the_kernels_do_not_make_is_left_to_others(place: torch.device) -> None:
    x, gain = torch.ones(2, 96).bfloat16(), torch.ones(96).bfloat16()
    wide = torch.ones(2, 512).bfloat16()
    assert takes(x, 96, FORM, "cuda")
    assert not takes(x, 96, FORM, "auto")  # no GPU
    assert not takes(x, 96, FORM, "triton")
    assert not takes(x, 96, None, "cuda")
    assert not takes(x, 96, Fp8Input(group=32), "cuda")
    assert not takes(x[:0], 96, FORM, "cuda")
    assert not takes(x.float(), 96, FORM, "cuda")
    assert not takes(x[:, 4:], 80, FORM, "cuda")
    assert not takes(x, 88, FORM, "cuda")
    assert not takes_norm(x, x, gain, FORM, "cuda")  # Triton's threads have other values
    gain = torch.ones(512).bfloat16()
    assert takes_norm(wide, wide, gain, FORM, "cuda")
    assert not takes_norm(wide, wide, gain.float(), FORM, "cuda")
    assert not takes_norm(wide, wide.T.contiguous().T, gain, FORM, "cuda")
