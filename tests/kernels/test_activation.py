from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specengine.kernels.linear.activation import ACTIVATIONS, act_and_mul, silu_and_mul


def test_reference_gates_the_second_half_by_the_first() -> None:
    x = torch.tensor([[0.0, 2.0, 5.0, 3.0]])
    expected = torch.tensor([[0.0, 2.0 * torch.sigmoid(torch.tensor(2.0)) * 3.0]])
    torch.testing.assert_close(silu_and_mul(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_equals_reference(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = (4 * torch.randn(3, 2 * 1030 + 6)).to(dtype).to(device)
    x = wide[:, 6:]
    gate, up = x[:, :1030], x[:, 1030:]
    tolerance = 1e-6 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(
        silu_and_mul(x, backend="triton"), F.silu(gate) * up, rtol=tolerance, atol=tolerance
    )


def test_zero_rows(device: torch.device) -> None:
    assert silu_and_mul(torch.empty(0, 8, device=device), backend="triton").shape == (0, 4)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_equals_other_activations(
    device: torch.device, dtype: torch.dtype, activation: str
) -> None:
    torch.manual_seed(0)
    x = (4 * torch.randn(3, 2 * 1030)).to(dtype).to(device)
    expected = act_and_mul(x, activation, backend="torch")
    tolerance = 5e-6 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(
        act_and_mul(x, activation, backend="triton"), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation_gates_the_second_half_by_the_first(activation: str) -> None:
    x = torch.tensor([[-1.5, 2.0, 5.0, 3.0]])
    expected = ACTIVATIONS[activation](x[:, :2]) * x[:, 2:]
    torch.testing.assert_close(act_and_mul(x, activation), expected)


def test_relu2_squares() -> None:
    assert ACTIVATIONS["relu2"](torch.tensor([-2.0, 3.0])).tolist() == [0.0, 9.0]
