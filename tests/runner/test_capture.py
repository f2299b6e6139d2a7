"""Captures: no garbage collection during one nor before it, and the order of streams around it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from specengine.core.interruption import (
    CaptureInterrupted,
    interruptible,
    interruption_point,
)
from specengine.core.platforms.cuda import CudaPlatform
from specengine.runner.capture import capture, without_garbage_collection
from tests.support.fake_platform import FakePlatform


@pytest.fixture
def collections() -> Iterator[list[str]]:
    seen: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        seen.append(phase)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_no_collection_runs_before_the_end(collections: list[str]) -> None:
    with without_garbage_collection():
        collections.clear()
        kept = [[number] for number in range(20_000)]
        assert not collections
    assert gc.isenabled()
    kept += [[number] for number in range(20_000)]
    assert collections


def test_nested_use_that_fails_keeps_collection_off(collections: list[str]) -> None:
    with without_garbage_collection():
        collections.clear()
        with pytest.raises(ValueError, match="captured in vain"), without_garbage_collection():
            raise ValueError("captured in vain")
        kept = [[number] for number in range(20_000)]
        assert len(kept) > len(collections) == 0
    assert gc.isenabled()


def test_overlapping_uses_collect_after_the_last() -> None:
    """Captures of two threads."""
    first, second = without_garbage_collection(), without_garbage_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_disabled_collection_stays_disabled() -> None:
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_current_stream_goes_on_behind_a_capture_that_is_given_up() -> None:
    """Amid the run before it, whose launches are on their way."""
    fake = FakePlatform()

    def run() -> None:
        fake.current_stream().launch()
        interruption_point()

    with pytest.raises(CaptureInterrupted), interruptible(lambda: True):
        capture(run, fake.graph_pool(), fake)
    assert fake.captures_on.seen <= fake.current_stream().seen
    assert fake.num_captures == 0


def test_failed_end_of_a_capture_leaves_the_current_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's own context leaves its stream the current one then."""
    streams = ["rounds"]

    @contextmanager
    def stream_of(stream: Any) -> Iterator[None]:
        streams.append(stream)
        before = len(streams) - 1
        try:
            yield
        finally:
            del streams[before:]

    @contextmanager
    def graph_of(graph: Any, **given: Any) -> Iterator[None]:
        streams.append(given["stream"])
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "stream", stream_of)
    monkeypatch.setattr(torch.cuda, "graph", graph_of)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaPlatform().record(lambda: None, "pool", "captures")
    assert streams == ["rounds"]
