from __future__ import annotations

import pytest
import torch

from specengine.kernels.kv.keep_rows import keep_rows


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_row_of_each(device: torch.device, backend: str) -> None:
    table = torch.zeros(5, 6, device=device)
    new = torch.arange(54.0, device=device).view(9, 6)
    rows, chosen = torch.tensor([4, 0, 2], device=device), torch.tensor([1, 0, 2], device=device)
    keep_rows(table, rows, new, chosen, backend=backend)  # type: ignore[arg-type]
    expected = torch.zeros(5, 6, device=device)
    expected[4], expected[2] = new[1], new[8]
    assert torch.equal(table, expected)
