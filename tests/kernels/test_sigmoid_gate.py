from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.linear.rounded import found_beside
from specengine.kernels.linear.sigmoid_gate import sigmoid_gate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """As a projection leaves the gate: behind the queries of each of 3 heads of 24."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 72, generator=made).to(device, dtype)
    pairs = (2 * torch.randn(rows, 3, 48, generator=made)).to(device, dtype)
    return x, pairs[..., 24:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_scales_each_number_by_its_gate(dtype: torch.dtype) -> None:
    x, gate = draw(5, dtype, torch.device("cpu"))
    expected = x * torch.sigmoid(gate.reshape(5, 72))
    assert torch.equal(sigmoid_gate(x, gate), expected)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_equals_reference(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    given = draw(rows, dtype, device)
    found = sigmoid_gate(*given, backend="triton")
    expected = sigmoid_gate(*given, backend="torch")
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_bits_of_a_row_do_not_depend_on_other_rows(device: torch.device) -> None:
    x, gate = draw(7, torch.float16, device)
    together = sigmoid_gate(x, gate, backend="triton")
    alone = [sigmoid_gate(x[i : i + 1], gate[i : i + 1], backend="triton") for i in range(7)]
    assert torch.equal(torch.cat(alone), together)


def test_what_the_kernel_does_not_take_is_computed_by_the_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specengine.kernels.linear.sigmoid_gate_triton.sigmoid_gate", None)
    x, gate = draw(2, torch.float32, device)
    across = gate.transpose(1, 2).contiguous().transpose(1, 2)
    found = sigmoid_gate(x, across, into=Fp8Input(), backend="triton")
    torch.testing.assert_close(found, sigmoid_gate(x, gate, backend="torch"))
    assert found_beside(found, Fp8Input()) is None


def test_zero_rows(device: torch.device) -> None:
    x, gate = draw(0, torch.float32, device)
    assert sigmoid_gate(x, gate, backend="triton").shape == (0, 72)
