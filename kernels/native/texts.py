"""What texts that C keeps have in common: how their functions are found, how they grow, and when
they go."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

from specengine.kernels.native.library import library

POINTER, COUNT, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32

Signatures = dict[str, tuple[Any, list[Any]]]  # what a function gives, and takes
Functions = Callable[[str], Any]


def functions_of(name: str, signatures: Signatures) -> Functions:
    """Those of a library, by name; it is compiled when the first is asked for."""

    @cache
    def function(called: str) -> Any:
        found = getattr(library(name), called)
        found.restype, found.argtypes = signatures[called]
        return found

    return function


class NativeText:
    """A text in C, freed when this object is. Raises MemoryError."""

    __slots__ = ("_free", "num_tokens", "pointer")

    def __init__(self, *given: int) -> None:
        """given: what the library's text_new takes."""
        self.num_tokens = 0
        self.pointer: Any = None
        self._free = self.functions("text_free")  # when texts go, modules may be gone
        self.pointer = self.functions("text_new")(*given)
        if self.pointer is None:
            raise MemoryError("no memory for a text")

    @staticmethod
    def functions(name: str) -> Any:
        """One of the library that keeps such texts."""
        raise NotImplementedError

    def __del__(self) -> None:
        if self.pointer is not None:
            self._free(self.pointer)


def extend(texts: Sequence[NativeText], new: Sequence[Sequence[int]]) -> None:
    """Each text, all of one kind, takes its new tokens. Raises MemoryError, and then only the first
    have all."""
    tokens, counts = array("i", chain.from_iterable(new)), array("q", map(len, new))
    given = pointers(texts), tokens, counts
    taken = texts[0].functions("texts_extend")(*map(address, given), len(texts))
    for text, count in zip(texts, counts, strict=True):
        text.num_tokens += count
    if taken < len(texts):
        raise MemoryError(f"no memory for a text of {texts[taken].num_tokens} tokens and more")


def pointers(texts: Sequence[NativeText]) -> array[int]:
    return array("Q", [text.pointer for text in texts])


def address(numbers: array[Any]) -> int:
    """Valid while the array is kept."""
    return numbers.buffer_info()[0]
