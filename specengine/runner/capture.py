"""Records CUDA graphs. Needs no runner: any function that launches kernels can be captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_one_at_a_time = Lock()  # engines in threads of one process share the stream


class CaptureInterrupted(Exception):
    """Work has come, and the graph that was being captured is given up."""


class _Interruption(threading.local):
    is_wanted: Callable[[], bool] | None = None


_interruption = _Interruption()


@contextmanager
def interruptible(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Captures of this thread end with CaptureInterrupted, at their next `interruption_point`, once
    is_wanted() holds."""
    _interruption.is_wanted = is_wanted
    try:
        yield
    finally:
        _interruption.is_wanted = None


def interruption_point() -> None:
    """Called between the parts of what is captured: a capture of a whole round takes 10 to 45 ms of
    the host, which a request must not wait for. Raises CaptureInterrupted."""
    if _interruption.is_wanted is not None and _interruption.is_wanted():
        raise CaptureInterrupted


def capture(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of what `run` launches, and what `run` returned: tensors that every replay writes.

    `run` is called once before the capture, which compiles kernels and creates library handles.
    pool: from torch.cuda.graph_pool_handle().
    """
    with _one_at_a_time:
        _warm_up([run])
        interruption_point()
        return _record(run, pool)


def capture_parts(parts: Sequence[Callable[[], object]], pool: Any) -> list[torch.cuda.CUDAGraph]:
    """One graph a part, in order. Tensors that a part leaves for the next must be kept alive."""
    with _one_at_a_time:
        _warm_up(parts)
        interruption_point()
        return [_record(part, pool)[0] for part in parts]


def _warm_up(parts: Sequence[Callable[[], object]]) -> None:
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        for part in parts:
            part()
    torch.cuda.current_stream().wait_stream(stream)


def _record(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    graph = torch.cuda.CUDAGraph()
    with (
        torch.inference_mode(),
        torch.cuda.graph(
            graph,
            pool=pool,
            stream=_capture_stream(),
            capture_error_mode="thread_local",
        ),
    ):
        output = run()
    return graph, output


class _Chosen(threading.local):
    stream: torch.cuda.Stream | None = None


_chosen = _Chosen()


@contextmanager
def capturing_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Captures of this thread are made on `stream`: wherever they are replayed, their kernels run
    on its SMs and at its priority. None: on the stream of all captures."""
    _chosen.stream, before = stream, _chosen.stream
    try:
        yield
    finally:
        _chosen.stream = before


def _capture_stream() -> torch.cuda.Stream:
    return _chosen.stream or _side_stream(torch.cuda.current_device())


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures. cuBLAS keeps a workspace of 32 MiB for every stream that it has
    run on: a stream for each capture took a GiB."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


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
