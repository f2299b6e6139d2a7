"""Records graphs. Needs no runner: any function that launches kernels can be captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

import torch

from specengine.core.interruption import interruption_point
from specengine.core.platform import Graph, Platform, Stream
from specengine.layers.side_stream import side_streams

T = TypeVar("T")

_one_at_a_time = Lock()  # engines in threads of one process share the stream


def capture(run: Callable[[], T], pool: Any, platform: Platform) -> tuple[Graph, T]:
    """A graph of what `run` launches, and what `run` returned: tensors that every replay writes.

    `run` is called once before the capture, which compiles kernels and creates library handles.
    pool: from platform.graph_pool().
    """
    with _one_at_a_time, torch.inference_mode(), side_streams(_chosen.stream is None):
        _warm_up([run], platform)
        interruption_point()
        return _record(run, pool, platform)


def capture_parts(
    parts: Sequence[Callable[[], object]], pool: Any, platform: Platform
) -> list[Graph]:
    """One graph a part, in order. Tensors that a part leaves for the next must be kept alive."""
    with _one_at_a_time, torch.inference_mode(), side_streams(_chosen.stream is None):
        _warm_up(parts, platform)
        interruption_point()
        return [_record(part, pool, platform)[0] for part in parts]


def _warm_up(parts: Sequence[Callable[[], object]], platform: Platform) -> None:
    """The current stream goes on behind it, also where it is interrupted or fails: what it has
    launched runs all the same, and shares buffers and counters with what comes next. Kernels whose
    blocks wait for each other would wait for ever."""
    stream, current = _capture_stream(platform), platform.current_stream()
    stream.wait_stream(current)
    try:
        with platform.on_stream(stream):
            for part in parts:
                part()
    finally:
        current.wait_stream(stream)


def _record(run: Callable[[], T], pool: Any, platform: Platform) -> tuple[Graph, T]:
    return platform.record(run, pool, _capture_stream(platform))


class _Chosen(threading.local):
    stream: Stream | None = None


_chosen = _Chosen()


@contextmanager
def capturing_on(stream: Stream | None) -> Iterator[None]:
    """Captures of this thread are made on `stream`: wherever they are replayed, their kernels run
    on its SMs and at its priority. None: on the stream of all captures."""
    _chosen.stream, before = stream, _chosen.stream
    try:
        yield
    finally:
        _chosen.stream = before


def _capture_stream(platform: Platform) -> Stream:
    return _chosen.stream or platform.capture_stream()


class _Collection:
    """Python's garbage collector, stopped while at least one thread asks for it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_stops = 0
        self._was_enabled = False

    def stop(self) -> None:
        with self._lock:
            if not self._num_stops:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_stops += 1

    def resume(self) -> None:
        with self._lock:
            self._num_stops -= 1
            if not self._num_stops and self._was_enabled:
                gc.enable()


_collection = _Collection()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A collection during a capture may free another engine's graphs or memory, which invalidates
    the capture. None is run beforehand either: it takes as long as several captures, and rounds
    wait for graphs that are captured late."""
    _collection.stop()
    try:
        yield
    finally:
        _collection.resume()
