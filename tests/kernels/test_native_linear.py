from __future__ import annotations

import pytest
import torch

from specengine.kernels.native import linear as native

pytestmark = pytest.mark.skipif(
    not native.fits(torch.empty(32, 1)), reason="no C compiler, or no AVX-512"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 1), (96, 7), (64, 130)])
def test_equals_a_plain_product(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(outputs, inputs).to(torch.bfloat16), torch.randn(outputs)
    panels = native.pack(weight)
    for rows in (*range(12), 33):
        x = torch.randn(2 * rows, inputs).to(dtype)[::2]
        found = native.linear(x, panels, bias)
        expected = (x.double() @ weight.double().t() + bias).to(dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_rows_do_not_depend_on_each_other() -> None:
    panels, bias = native.pack(torch.randn(64, 50)), torch.zeros(64)
    x = torch.randn(23, 50)
    whole = native.linear(x, panels, bias)
    for rows in range(1, 23):
        assert torch.equal(native.linear(x[:rows], panels, bias), whole[:rows])


def test_rounding_to_bfloat16_is_to_nearest_even_and_keeps_the_special() -> None:
    values = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-9, torch.inf, -torch.inf, torch.nan, 0.0, -3.4e38]
    bias = torch.tensor(values * 4)
    x = torch.zeros(1, 4, dtype=torch.bfloat16)
    found = native.linear(x, native.pack(torch.zeros(32, 4)), bias)[0]
    torch.testing.assert_close(found, bias.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def test_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.fits(torch.empty(64, 5))
    assert not native.fits(torch.empty(48, 5))
    assert not native.fits(torch.empty(64, 5, device="meta"))
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: False)
    assert not native.fits(torch.empty(64, 5))
