"""How a thread brings the bytes of a batch from a file to places on a device."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.core.platform import platform_of
from specengine.runner.loader.batches import Batch


class DeviceLanding:
    """Of one thread: it is made, used and ended there.

    A batch is read to a buffer of pinned memory and copied to one of the device as a whole,
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
        """file: the descriptor of the batch's file. The bytes may arrive later."""
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
        """Returns when all bytes have arrived."""
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
    """What lies from byte `at` of a buffer, uint8, as `tensor` has it in its file."""
    typed = buffer.view(tensor.dtype)
    return typed.as_strided(tensor.shape, tensor.stride(), at // tensor.element_size())
