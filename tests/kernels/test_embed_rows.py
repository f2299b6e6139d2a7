from __future__ import annotations

import pytest
import torch

from specengine.kernels.head.embed_rows import embed_rows


@pytest.mark.parametrize("hidden", [5, 24, 1500])
def test_rows_by_strided_ids(hidden: int, device: torch.device) -> None:
    weight = torch.randn(30, hidden + 3, device=device).bfloat16()[:, :hidden]
    ids = torch.tensor([[3, 1], [29, 1], [0, 1], [3, 1]], device=device)[:, 0]
    expected = weight[ids]
    for backend in ("torch", "triton"):
        found = embed_rows(weight, ids, backend=backend)  # type: ignore[arg-type]
        assert torch.equal(found, expected)
    assert embed_rows(weight, ids[:0], backend="triton").shape == (0, hidden)
