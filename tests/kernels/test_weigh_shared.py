from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.kernels.experts.weigh_shared import weigh_shared

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Rows, width, inputs of the gate.
SHAPES = [(1, 80, 80), (5, 24, 40), (17, 64, 64)]
Given = tuple[Tensor, Tensor, Tensor]


def draw(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Given:
    """Rows of the shared output and of the gate's input stand in wider ones."""
    made = torch.Generator().manual_seed(0)
    rows, hidden, inputs = shape
    shared = 2 * torch.randn(rows, hidden + 8, generator=made)
    x = torch.randn(rows, inputs + 8, generator=made)
    gate = 0.3 * torch.randn(1, inputs, generator=made)
    half = [one.to(device, dtype) for one in (shared, x, gate)]
    return half[0][:, 8:], half[1][:, 8:], half[2]


def weighed(shared: Tensor, x: Tensor | None, gate: Tensor | None, backend: str) -> Tensor:
    out = torch.full(shared.shape, torch.nan, device=shared.device)
    weigh_shared(shared, x, gate, out, backend=backend)  # type: ignore[arg-type]
    return out


def test_share_is_weighed_by_its_gate() -> None:
    shared, x, gate = draw((5, 24, 40), torch.float32, torch.device("cpu"))
    share = torch.sigmoid((x.double() * gate.double()).sum(1, keepdim=True)) * shared.double()
    found = weighed(shared, x, gate, "auto")
    torch.testing.assert_close(found.double(), share, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_equals_reference(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    given = draw(shape, dtype, device)
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    found, expected = weighed(*given, "triton"), weighed(*given, "torch")
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_gate_the_share_is_what_is_shared(
    device: torch.device, dtype: torch.dtype
) -> None:
    shared, *_ = draw(SHAPES[1], dtype, device)
    assert torch.equal(weighed(shared, None, None, "triton"), shared.float())


def test_bits_of_a_row_do_not_depend_on_other_rows(device: torch.device) -> None:
    shared, x, gate = draw(SHAPES[2], torch.float16, device)
    alone = [
        weighed(shared[row : row + 1], x[row : row + 1], gate, "triton") for row in range(len(x))
    ]
    assert torch.equal(torch.cat(alone), weighed(shared, x, gate, "triton"))


def test_what_the_kernel_does_not_take_is_computed_by_the_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "specengine.kernels.experts.weigh_shared_triton.weigh_shared"
    monkeypatch.setattr(place, None)
    shared, x, gate = draw(SHAPES[1], torch.float32, device)
    across = torch.empty(shared.T.shape, device=device).T
    weigh_shared(shared, x, gate, across, backend="triton")
    torch.testing.assert_close(across, weighed(shared, x, gate, "torch"))


def test_zero_rows(device: torch.device) -> None:
    assert weighed(*draw((0, 16, 16), torch.float32, device), "triton").shape == (0, 16)
