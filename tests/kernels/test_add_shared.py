from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.kernels.experts.add_shared import add_shared

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Parts, rows, width, inputs of the gate.
SHAPES = [(3, 1, 80, 80), (1, 5, 24, 40), (11, 17, 64, 64)]
Given = tuple[Tensor, Tensor, Tensor, Tensor]


def draw(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Given:
    """Rows of the shared output and of the gate's input stand in wider ones."""
    made = torch.Generator().manual_seed(0)
    count, rows, hidden, inputs = shape
    parts = torch.randn(count, rows, hidden, generator=made)
    shared = 2 * torch.randn(rows, hidden + 8, generator=made)
    x = torch.randn(rows, inputs + 8, generator=made)
    gate = 0.3 * torch.randn(1, inputs, generator=made)
    half = [one.to(device, dtype) for one in (shared, x, gate)]
    return parts.to(device), half[0][:, 8:], half[1][:, 8:], half[2]


def test_share_is_weighed_and_added_to_the_last_part() -> None:
    parts, shared, x, gate = draw((3, 5, 24, 40), torch.float32, torch.device("cpu"))
    before = parts.clone()
    found = add_shared(parts, shared, x, gate)
    share = torch.sigmoid((x.double() * gate.double()).sum(1, keepdim=True)) * shared.double()
    assert found is parts
    assert torch.equal(found[:2], before[:2])
    torch.testing.assert_close(found[2].double(), before[2].double() + share, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_equals_reference(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    parts, *given = draw(shape, dtype, device)
    expected = add_shared(parts.clone(), *given, backend="torch")
    found = add_shared(parts, *given, backend="triton")
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_gate_what_is_shared_is_added_as_it_is(
    device: torch.device, dtype: torch.dtype
) -> None:
    parts, shared, *_ = draw(SHAPES[1], dtype, device)
    expected = parts + shared.float()
    assert torch.equal(add_shared(parts, shared, backend="triton"), expected)


def test_bits_of_a_row_do_not_depend_on_other_rows(device: torch.device) -> None:
    parts, shared, x, gate = draw(SHAPES[2], torch.float16, device)
    alone = [
        add_shared(
            parts[:, row : row + 1].contiguous(),
            shared[row : row + 1],
            x[row : row + 1],
            gate,
            backend="triton",
        )
        for row in range(17)
    ]
    together = add_shared(parts, shared, x, gate, backend="triton")
    assert torch.equal(torch.cat(alone, 1), together)


def test_what_the_kernel_does_not_take_is_computed_by_the_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specengine.kernels.experts.add_shared_triton.add_shared", None)
    parts, shared, x, gate = draw(SHAPES[1], torch.float32, device)
    across = parts.transpose(1, 2).contiguous().transpose(1, 2)
    expected = add_shared(parts.clone(), shared, x, gate, backend="torch")
    torch.testing.assert_close(add_shared(across, shared, x, gate, backend="triton"), expected)


def test_zero_rows(device: torch.device) -> None:
    parts, shared, x, gate = draw((2, 0, 16, 16), torch.float32, device)
    assert add_shared(parts, shared, x, gate, backend="triton").shape == (2, 0, 16)
