from __future__ import annotations

import pytest
import torch

from specengine.kernels.head.row_argmax import row_argmax
from specengine.kernels.head.types import Meeting

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 5000), (3, 2048), (9, 300), (20, 9000)])
def test_largest(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, cols, device=device).to(dtype)
    x -= 6.0 * (torch.arange(rows, device=device) % 2)[:, None]  # some rows are all negative
    ids = torch.randperm(cols, device=device)
    meeting = Meeting.of(rows, device)
    for _ in range(2):
        assert torch.equal(row_argmax(x, meeting, backend="triton"), x.float().argmax(-1))
        mapped = row_argmax(x, meeting, ids, backend="triton")
        assert torch.equal(mapped, ids[x.float().argmax(-1)])
    assert not meeting.keys.any()
    assert not meeting.counters.any()


def test_the_first_among_equals(device: torch.device) -> None:
    x = torch.zeros(2, 7000, device=device)
    x[0, [2047, 2048, 6000]] = 1.0
    x[1] = -0.0
    assert row_argmax(x, Meeting.of(2, device), backend="triton").tolist() == [2047, 0]


def test_minus_infinity(device: torch.device) -> None:
    x = torch.full((1, 4100), float("-inf"), device=device)
    x[0, 4099] = -1e30
    assert row_argmax(x, Meeting.of(1, device), backend="triton").tolist() == [4099]
