"""Streams of a CUDA device, given out by a pool of four in place of PyTorch's."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from specengine.core.platforms import cuda_streams
from specengine.core.platforms.cuda import CudaPlatform
from specengine.core.platforms.cuda_streams import capture_streams, new_stream

POOL = 4


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = count()

    class Drawn:
        def __init__(self, device: int) -> None:
            self.cuda_stream = 100 * device + next(drawn) % POOL

    monkeypatch.setattr(torch.cuda, "Stream", Drawn)
    monkeypatch.setattr(cuda_streams, "_made", {})


def handles(*streams: Any) -> list[int]:
    return [one.cuda_stream for one in streams]


def test_captures_keep_their_streams() -> None:
    kept = handles(*capture_streams(0))
    others = handles(*(new_stream(0) for _ in range(2 * POOL)))
    assert len(set(kept)) == 2
    assert set(others) == set(range(POOL)) - set(kept)
    assert handles(*capture_streams(0)) == kept


def test_streams_are_reserved_before_the_first_is_given() -> None:
    given = handles(new_stream(0))
    assert not set(given) & set(handles(*capture_streams(0)))


def test_each_device_has_its_own() -> None:
    assert min(handles(*capture_streams(1), new_stream(1))) >= 100


def test_the_platform_gives_them_on_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    platform = CudaPlatform()
    assert platform.capture_stream() is capture_streams(2).main
    assert min(handles(platform.new_stream())) >= 200
