"""Hands out pages of KV slots."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specengine.core.errors import InvariantError

IntArray = NDArray[Any]


class TokenToKVPoolAllocator:
    """A stack of free pages, on the host alone. Page p holds slots p * page_size and those that
    follow; page 0 is never handed out, so that no request owns slot 0.

    num_slots: slots of the KV pool, those of page 0 included; a last incomplete page is not used.
    """

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_slots // page_size - 1
        if self.num_pages < 1:
            raise ValueError(f"{num_slots} KV slots are less than two pages of {page_size}")
        self._stack: IntArray = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self._num_free = self.num_pages
        # Page 0 counts as free here, and is not in the stack: it must not be freed.
        self._is_free = np.ones(self.num_pages + 1, dtype=np.bool_)

    @property
    def capacity(self) -> int:
        """Slots that can be handed out."""
        return self.num_pages * self.page_size

    @property
    def available(self) -> int:
        """Slots that are free."""
        return self._num_free * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def alloc_pages(self, count: int) -> IntArray | None:
        """int32 [count], or None where fewer are free."""
        if count > self._num_free:
            return None
        self._num_free -= count
        pages = self._stack[self._num_free : self._num_free + count][::-1].copy()
        self._is_free[pages.astype(np.intp)] = False
        return pages

    def free_pages(self, pages: IntArray) -> None:
        """Raises InvariantError for a page that is free already, or reserved."""
        index = pages.astype(np.intp)  # numpy looks up few places faster so
        if np.count_nonzero(self._is_free[index]):
            raise InvariantError(f"pages {pages.tolist()} freed, some free already or reserved")
        self._is_free[index] = True
        end = self._num_free + len(pages)
        self._stack[self._num_free : end] = pages[::-1]
        self._num_free = end

    def slots_of(self, pages: IntArray) -> IntArray:
        """int32 [len(pages) * page_size]."""
        if self.page_size == 1:
            return pages
        first = pages[:, None] * self.page_size
        return (first + np.arange(self.page_size, dtype=np.int32)).reshape(-1)

    def pages_of(self, slots: IntArray) -> IntArray:
        """The pages of slots that begin on a page boundary; the last page may be cut short."""
        return slots if self.page_size == 1 else slots[:: self.page_size] // self.page_size
