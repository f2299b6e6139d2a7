"""Texts that look up their own end, compiled from lookup.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from specengine.kernels.native.library import library

_P, _I = ctypes.c_void_p, ctypes.c_int64
_LONGEST = 1 << 24  # context, in tokens: no text is longer
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "text_new": (_P, [ctypes.c_int32, ctypes.c_int32]),
    "text_free": (None, [_P]),
    "texts_extend": (_I, [_P, _P, _P, _I]),
    "texts_draft": (None, [_P, _P, _I, _I, _P, _P]),
}


@cache
def _function(name: str) -> Any:
    function = getattr(library("lookup"), name)
    function.restype, function.argtypes = _FUNCTIONS[name]
    return function


def is_compiled() -> bool:
    return library("lookup") is not None


class LookupText:
    """A text that grows (`extend`) and says what followed its end before (`draft`). Matches are
    contexts of min_match tokens at least; longer ones than max_match count as max_match. Raises
    MemoryError."""

    __slots__ = ("_free", "num_tokens", "pointer")

    def __init__(self, min_match: int, max_match: int) -> None:
        self.num_tokens = 0
        self.pointer: Any = None
        self._free = _function("text_free")  # when texts go, modules may be gone
        self.pointer = _function("text_new")(min(min_match, _LONGEST), min(max_match, _LONGEST))
        if self.pointer is None:
            raise MemoryError("no memory for a text")

    def __del__(self) -> None:
        if self.pointer is not None:
            self._free(self.pointer)


def extend(texts: Sequence[LookupText], new: Sequence[Sequence[int]]) -> None:
    """Each text takes its new tokens. Raises MemoryError; those that have not got theirs are as
    they were."""
    tokens, counts = array("i", chain.from_iterable(new)), array("q", map(len, new))
    given = _pointers(texts), tokens, counts
    taken = _function("texts_extend")(*map(_address, given), len(texts))
    for text, count in zip(texts[:taken], counts, strict=False):
        text.num_tokens += count
    if taken < len(texts):
        raise MemoryError(f"no memory for a text of {texts[taken].num_tokens} tokens and more")


def draft(texts: Sequence[LookupText], most: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Of each text, none of them empty, its last token and, where its end occurred before, the
    most[i] that followed -> int64 [B, 1 + the largest of most], padded with 0, and how many of each
    row these are."""
    pointers, limits, counts = _pointers(texts), array("q", most), array("q", most)
    drafts = torch.empty(len(texts), 1 + max(most), dtype=torch.int64)
    given = _address(pointers), _address(limits), *drafts.shape, drafts.data_ptr()
    _function("texts_draft")(*given, _address(counts))
    return drafts, counts.tolist()


def _pointers(texts: Sequence[LookupText]) -> array[int]:
    return array("Q", [text.pointer for text in texts])


def _address(numbers: array[int]) -> int:
    """For as long as somebody keeps the array."""
    return numbers.buffer_info()[0]
