"""How many prompt tokens a forward takes where nothing else is asked for."""

from __future__ import annotations

import pytest
import torch

from specengine.engine import resolve


@pytest.mark.parametrize(
    ("multiprocessors", "expected"),
    [(132, 8448), (148, 9472), (114, 7296), (108, 6912), (40, 7680), (16, 8192), (1, 8192)],
)
def test_default_chunk_is_near_8192_and_fills_all_multiprocessors(
    multiprocessors: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "multiprocessors", lambda device: multiprocessors)
    assert resolve._chunk(torch.device("cpu")) == expected
