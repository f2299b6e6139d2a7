"""While a graph is captured nothing is collected, and no collection comes first."""

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


def test_none_comes(collections: list[str]) -> None:
    with without_garbage_collection():
        kept = [[number] for number in range(20_000)]
        assert not collections
    assert gc.isenabled()
    kept += [[number] for number in range(20_000)]
    assert collections


def test_one_inside_another(collections: list[str]) -> None:
    with without_garbage_collection():
        with pytest.raises(ValueError, match="captured in vain"), without_garbage_collection():
            raise ValueError("captured in vain")
        kept = [[number] for number in range(20_000)]
        assert len(kept) > len(collections) == 0
    assert gc.isenabled()


def test_two_threads_that_overlap() -> None:
    """The one that ends first collects nothing for the other."""
    first, second = without_garbage_collection(), without_garbage_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_who_collects_by_hand_goes_on_so() -> None:
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
