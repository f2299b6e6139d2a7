"""The page table: which KV slot holds each token of each request."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specengine.core.platform import platform_of
from specengine.core.transfer import sent

IntArray = NDArray[Any]


class ReqToTokenPool:
    """One row a request, kept twice: the scheduler reads and writes the host copy, forwards read
    the device copy. On CPU the two are one.

    Row 0 belongs to no request and stays all zeros: graph padding points there, and from there to
    KV slot 0, which belongs to none either. So does one more behind the last row: attention of a
    token past the context's end looks for keys behind its request's row, and must find slots there.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device) -> None:
        self.size = size
        self.max_context_len = max_context_len
        host = _zeros(size, max_context_len, torch.device("cpu"))
        on_host = not platform_of(device).is_accelerator
        self.req_to_token = host if on_host else _zeros(size, max_context_len, device)
        self._is_mirrored = not on_host
        self._host: IntArray = host.numpy()
        self._free_rows = list(range(size, 0, -1))
        self._unsent: list[tuple[int, int]] = []  # runs of places, by first and length, to send

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    def alloc(self) -> int | None:
        return self._free_rows.pop() if self._free_rows else None

    def free(self, row: int) -> None:
        self._free_rows.append(row)

    def slots(self, row: int, start: int, end: int) -> IntArray:
        """int32 [end - start], a view of the host copy that the next write may change."""
        return self._host[row, start:end]

    def write(self, row: int, start: int, slots: IntArray) -> None:
        """Set the slots of tokens start .. start + len(slots) - 1; the device sees it after
        `flush`."""
        end = start + len(slots)
        self._host[row, start:end] = slots
        if self._is_mirrored:
            self._unsent.append((row * self.max_context_len + start, len(slots)))

    def flush(self) -> None:
        """Send everything written since the last flush to the device, in one asynchronous copy on
        the current stream."""
        if not self._unsent:
            return
        # Values are read from the host copy only now, so that a place written twice is sent twice
        # with the same value: the scatter below has no order.
        firsts, counts = np.array(self._unsent).T
        self._unsent.clear()
        ends = counts.cumsum()
        places = np.repeat(firsts - ends + counts, counts) + np.arange(ends[-1])
        moved = torch.from_numpy(np.stack((places, self._host.reshape(-1)[places])))
        packed = sent(moved, self.req_to_token.device)
        self.req_to_token.view(-1)[packed[0]] = packed[1].to(torch.int32)


def _zeros(size: int, max_context_len: int, device: torch.device) -> Tensor:
    """Row 0, then the rows of requests; the one behind them is not shown."""
    rows = torch.zeros(size + 2, max_context_len, dtype=torch.int32, device=device)
    return rows[: size + 1]
