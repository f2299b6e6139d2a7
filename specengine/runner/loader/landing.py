"""How a thread brings the bytes of a batch from a file to places, on the host or on a device."""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.core.platform import platform_of
from specengine.runner.loader.batches import Batch
from specengine.runner.loader.mapped_files import num_bytes_spanned

# Elements up to which PyTorch copies in the thread that asks. Above, it wakes threads of its own
# for each copy; those of several ranks, as many as cores each, wait for each other.
_SERIAL = 32768


class Landing(Protocol):
    """Of one thread: it is made, used and ended there."""

    def land(self, file: int, batch: Batch) -> None:
        """file: the descriptor of the batch's file. The bytes may arrive later."""
        ...

    def end(self) -> None:
        """Returns when all bytes have arrived."""
        ...


class HostLanding:
    """Bytes are read to where they belong. A part of rows, or another type, goes by a buffer, a
    piece at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffer: Tensor | None = None  # most models on one rank need none

    def land(self, file: int, batch: Batch) -> None:
        for piece in batch.pieces:
            place, tensor = piece.move.place, piece.move.tensor
            is_whole = place.is_contiguous() and tensor.is_contiguous()
            if is_whole and place.dtype == tensor.dtype:
                whole = place.view(-1).view(torch.uint8)
                read_bytes(file, whole, piece.start, batch)
                continue
            if self.buffer is None:
                self.buffer = torch.empty(self.size, dtype=torch.uint8)
            read_bytes(file, self.buffer[: num_bytes_spanned(tensor)], piece.start, batch)
            _copy_serially(place, _view(self.buffer, 0, tensor))

    def end(self) -> None: ...


class DeviceLanding:
    """A batch is read to a buffer of pinned memory and copied to one of the device as a whole,
    which the device cuts up: one copy between the two for many tensors. A stream of its own orders
    this thread's work; the host waits for it before the buffer is read to again."""

    def __init__(self, device: torch.device, size: int, after: object) -> None:
        """after: an event, behind which the places' memory is free. size: of batches."""
        self.platform = platform_of(device)
        if device.index is not None:
            self.platform.use_device(device.index)
        self.stream, self.event = self.platform.new_stream(), self.platform.new_event()
        self.host = self.platform.pinned(torch.empty(size, dtype=torch.uint8))
        with self.platform.on_stream(self.stream):
            self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        if self.stream is not None:
            self.stream.wait_event(after)
        self.is_busy = False

    def land(self, file: int, batch: Batch) -> None:
        self.end()
        for read in batch.reads:
            read_bytes(file, self.host[read.at : read.end], read.start, batch)
        with self.platform.on_stream(self.stream):
            try:
                self.buffer[: batch.size].copy_(self.host[: batch.size], non_blocking=True)
                for piece in batch.pieces:
                    piece.move.place.copy_(_view(self.buffer, piece.at, piece.move.tensor))
            finally:
                self.event.record()
                self.is_busy = True

    def end(self) -> None:
        if self.is_busy:
            self.event.synchronize()
            self.is_busy = False


def read_bytes(file: int, place: Tensor, start: int, batch: Batch) -> None:
    """Fill `place`, uint8 [n] on the host, from byte `start` of the batch's file. Raises OSError,
    and ModelLoadError where the file ends before."""
    memory = place.numpy().data
    while memory:
        count = os.preadv(file, [memory], start)
        if not count:
            found = [one.move.name for one in batch.pieces if one.start <= start]
            raise ModelLoadError(
                f"{batch.path} ends at byte {start}, {len(memory)} bytes before the end of what is "
                f"read with tensor {found[-1]}: it was changed while it was read; load again when "
                "it is whole"
            )
        memory, start = memory[count:], start + count


def _view(buffer: Tensor, at: int, tensor: Tensor) -> Tensor:
    """What stands from byte `at` of a buffer, uint8, as `tensor` has it in its file."""
    typed = buffer.view(tensor.dtype)
    return typed.as_strided(tensor.shape, tensor.stride(), at // tensor.element_size())


def _copy_serially(place: Tensor, tensor: Tensor) -> None:
    """``place.copy_(tensor)`` on the host by this thread alone."""
    if not tensor.dim():
        place.copy_(tensor)
        return
    rows = max(1, _SERIAL // max(1, tensor[0].numel()))
    pairs = zip(torch.split(place, rows), torch.split(tensor, rows), strict=True)
    for mine, other in pairs:
        mine.copy_(other)
