"""Compiled weights and draws have the bits of PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.kernels.native import sample as native
from specengine.kernels.sample.sample_rows_ref import exp_below_, invert_cdf

pytestmark = pytest.mark.skipif(native.library("sample") is None, reason="no C compiler")


def in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda name: None)


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def test_compiled_exp_has_the_bits_of_pytorch(
    seeded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = torch.tensor([0.0, -0.0, -1e-40, -40.0, -39.99999, -87.0, float("-inf"), float("nan")])
    x_RV = torch.cat([-45 * torch.rand(20_000 - len(edges)), edges]).view(4, -1)
    found_RV = exp_below_(x_RV.clone())
    in_pytorch(monkeypatch)
    assert torch.equal(bits_of(found_RV), bits_of(exp_below_(x_RV.clone())))
    assert found_RV.unique().numel() > 10_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", ["rows", "one row"])
def test_compiled_draws_are_those_of_pytorch(
    dtype: torch.dtype, spread: str, seeded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without weight, of one token and of equal ones, of a few units each, and the ends of the
    unit interval."""
    weights_RV = torch.rand(300, 1000, dtype=dtype) ** 8
    weights_RV[20:60] *= 2.0**-40
    weights_RV[3], weights_RV[4], weights_RV[5, 1:], weights_RV[6, :-1] = 0, 1, 0, 0
    uniforms_R = torch.rand(300, dtype=torch.float64)
    uniforms_R[:14:2], uniforms_R[1:14:2] = 0.0, 1 - 2.0**-53
    if spread == "one row":
        weights_RV = weights_RV[:1].expand(300, -1)
    assert native.fits_weights(weights_RV, uniforms_R)
    found_R = invert_cdf(weights_RV, uniforms_R)
    in_pytorch(monkeypatch)
    assert torch.equal(found_R, invert_cdf(weights_RV, uniforms_R))
    assert found_R.unique().numel() > 100


def test_other_layouts_are_left_to_pytorch() -> None:
    assert not native.fits_exp(torch.zeros(4, 6).T)
    assert not native.fits_exp(torch.zeros(4, 6, dtype=torch.float64))
    assert not native.fits_weights(torch.zeros(4, 6).T, torch.zeros(6, dtype=torch.float64))
    assert not native.fits_weights(torch.zeros(4, 6), torch.zeros(4))
