"""No garbage collection runs during a capture, nor before it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from specengine.runner.capture import without_garbage_collection


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
        kept = [[number] for number in range(20_000)]
        assert not collections
    assert gc.isenabled()
    kept += [[number] for number in range(20_000)]
    assert collections


def test_nested_use_that_fails_keeps_collection_off(collections: list[str]) -> None:
    with without_garbage_collection():
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
