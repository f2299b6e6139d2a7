"""Host memory that is given back: pages whose contents lie in a file meanwhile."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import IO
from weakref import finalize

import torch
from torch import Tensor

from specengine.core.errors import ConfigError
from specengine.core.region import Region

_DONTNEED = 4  # Linux's MADV_DONTNEED: private pages are gone, and read as zeros


@dataclass(frozen=True)
class Span:
    """The memory of one storage, in bytes."""

    address: int
    size: int

    @property
    def bytes(self) -> memoryview:
        return memoryview((ctypes.c_ubyte * self.size).from_address(self.address)).cast("B")

    @property
    def whole_pages(self) -> Span | None:
        """What of it no other memory shares a page with."""
        page = mmap.PAGESIZE
        first, end = -(-self.address // page) * page, (self.address + self.size) // page * page
        return Span(first, end - first) if end > first else None


class HostRegion(Region):
    """Addresses stay, since only the pages go. Meanwhile a nameless file in TMPDIR has them."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Span] = []
        self._file: IO[bytes] | None = None

    def allocating(self) -> AbstractContextManager[object]:
        return nullcontext()

    def release(self, dropped: Iterable[Tensor]) -> int:
        if not sys.platform.startswith("linux"):
            raise ConfigError("sleep on a CPU gives pages back as Linux does, which is not here")
        gone = {span.address: span for span in _spans(dropped)}
        kept = [span for span in _spans(self.find()) if span.address not in gone]
        file = _file()  # closed by restore
        try:
            for span in kept:
                file.write(span.bytes)
            file.flush()
        except OSError as error:
            file.close()
            raise ConfigError(
                f"the weights do not fit in {tempfile.gettempdir()}: {error}"
            ) from error
        self._kept, self._file = kept, file
        finalize(self, file.close)  # where it is never restored
        for span in gone.values():
            _clear_edges(span)
        return sum(_give_back(span) for span in [*kept, *gone.values()])

    def restore(self) -> None:
        assert self._file is not None, "nothing was released"
        self._file.seek(0)
        for span in self._kept:
            self._file.readinto(span.bytes)  # type: ignore[attr-defined]
        self._file.close()
        self._kept, self._file = [], None


def _file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise ConfigError(
            f"no file can be made for the weights: {error}; see to the directory that TMPDIR names"
        ) from error


def _spans(tensors: Iterable[Tensor]) -> Iterator[Span]:
    """Of each storage once. What oneDNN has packed has none, and stays."""
    seen: set[int] = set()
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu" and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield Span(storage.data_ptr(), storage.nbytes())


def _clear_edges(span: Span) -> None:
    """What lies in pages that other memory shares, and that stay."""
    pages = span.whole_pages or Span(span.address + span.size, 0)
    ctypes.memset(span.address, 0, pages.address - span.address)
    end = pages.address + pages.size
    ctypes.memset(end, 0, span.address + span.size - end)


def _give_back(span: Span) -> int:
    """Bytes."""
    pages = span.whole_pages
    if pages is None:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    place, size = ctypes.c_void_p(pages.address), ctypes.c_size_t(pages.size)
    if libc.madvise(place, size, _DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pages.size
