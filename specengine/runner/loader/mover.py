"""Moves weights from files to a model, in several threads.

A loader's time goes to the host's memory: faults of mapped pages, copies from pageable memory that
each wait for the device, and rows that are cut on the host, for which PyTorch wakes all cores a
tensor. So the bytes are not touched through the mapping. Threads take batches of neighbouring bytes
(batches.py), read them with `preadv` and land them (landing.py), on a device by pinned memory and
one copy a batch. A rank reads the bytes of its own parts alone, as far as they lie together: of a
part of each row the whole rows.

A model on the host is copied tensor by tensor from mappings, a file at a time: the first write to
its memory takes most of the time. Reads to that memory and copies by a buffer were slower.

Bounds: a thread has one file open and one batch in memory; on a device as much there again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.core.parallel import communicator
from specengine.core.platform import platform_of
from specengine.layers.moves import Move
from specengine.runner.loader.batches import Batch, batches_of
from specengine.runner.loader.landing import DeviceLanding
from specengine.runner.loader.mapped_files import MappedFiles

BATCH_BYTES = 16 << 20  # of pinned memory a thread; copies to a device reach their rate far below
MOST_THREADS = 8  # of a rank: 128 MiB of pinned memory, and as much on the device


class FileMover:
    """layers.moves.Mover for tensors of `files`."""

    def __init__(
        self, files: MappedFiles, num_threads: int | None = None, batch_bytes: int | None = None
    ) -> None:
        """num_threads: None is this rank's share of the cores, MOST_THREADS at most. batch_bytes:
        None is BATCH_BYTES."""
        self.files = files
        self.num_threads = num_threads or _share_of_cores()
        self.batch_bytes = batch_bytes or BATCH_BYTES

    def owns(self, tensor: Tensor) -> bool:
        return self.files.find(tensor) is not None

    def move(self, moves: Sequence[Move]) -> None:
        """The first error of a thread ends the others behind their batches, and is raised. Raises
        ModelLoadError for a file that cannot be read."""
        by_device: dict[torch.device, list[Move]] = {}
        for move in moves:
            by_device.setdefault(move.place.device, []).append(move)
        for device, own in by_device.items():
            self._move(device, own)

    def _move(self, device: torch.device, moves: Sequence[Move]) -> None:
        if _is_host(device):
            for move in moves:
                move.place.copy_(move.tensor)
            return
        batches = batches_of(moves, self.files.find, self.batch_bytes)
        size = max((batch.size for batch in batches), default=0)
        size = -(-size // 16) * 16  # of whole elements of every type
        after = platform_of(device).new_event()
        after.record()
        self._run(batches, lambda: DeviceLanding(device, size, after))

    def _run(self, batches: Sequence[Batch], make_landing: Callable[[], DeviceLanding]) -> None:
        left, failed = _Left(batches), Event()

        def work() -> None:
            try:
                _land_all(left, failed, make_landing())
            except BaseException:
                failed.set()
                raise

        count = min(self.num_threads, len(batches))
        with ThreadPoolExecutor(max(1, count)) as pool:
            try:
                for one in [pool.submit(work) for _ in range(count)]:
                    one.result()
            finally:
                failed.set()  # also where the caller is interrupted


class _Left:
    """Hands each batch to one thread."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches: Iterator[Batch] = iter(batches)
        self._lock = Lock()

    def take(self) -> Batch | None:
        with self._lock:
            return next(self._batches, None)


def _land_all(left: _Left, failed: Event, landing: DeviceLanding) -> None:
    with torch.no_grad():
        try:
            while not failed.is_set() and (batch := left.take()) is not None:
                _land(batch, landing)
        finally:
            landing.end()  # memory that a device still writes to may be given back behind this


def _land(batch: Batch, landing: DeviceLanding) -> None:
    try:
        file = os.open(batch.path, os.O_RDONLY)
        try:
            landing.land(file, batch)
        finally:
            os.close(file)
    except OSError as error:
        names = f"{batch.pieces[0].move.name} to {batch.pieces[-1].move.name}"
        raise ModelLoadError(f"{batch.path} cannot be read (tensors {names}): {error}") from error


def mover_to(device: torch.device) -> FileMover | None:
    """For a model there. None on the host, whose memory would hold all files' pages beside it."""
    return None if _is_host(device) else FileMover(MappedFiles())


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _share_of_cores() -> int:
    """Of the ranks on this machine, as far as that is known: all are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MOST_THREADS, max(1, (cores or 1) // communicator().size))
