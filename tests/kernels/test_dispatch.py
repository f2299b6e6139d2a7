"""What decides which implementation runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specengine.kernels.dispatch import has_whole_device


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    has_whole_device.cache_clear()
    yield
    has_whole_device.cache_clear()


def test_under_mps_the_device_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not has_whole_device()


def test_without_it_the_device_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "nothing here"))
    assert has_whole_device()
