"""Texts that look up their own end, compiled from lookup.c."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specengine.kernels.native.library import library
from specengine.kernels.native.texts import (
    COUNT,
    INT,
    POINTER,
    NativeText,
    Signatures,
    address,
    functions_of,
    pointers,
)

_LONGEST = 1 << 24  # context, in tokens: no text is longer
_FUNCTIONS: Signatures = {
    "text_new": (POINTER, [INT, INT]),
    "text_free": (None, [POINTER]),
    "texts_extend": (COUNT, [POINTER, POINTER, POINTER, COUNT]),
    "texts_draft": (None, [POINTER, POINTER, COUNT, COUNT, POINTER, POINTER]),
}
_function = functions_of("lookup", _FUNCTIONS)


def is_compiled() -> bool:
    return library("lookup") is not None


class LookupText(NativeText):
    """A text that grows (`texts.extend`) and says what followed its end before (`draft`). Matches
    are contexts of min_match tokens at least; longer ones than max_match count as max_match. Raises
    MemoryError."""

    __slots__ = ()

    @staticmethod
    def functions(name: str) -> Any:
        return _function(name)

    def __init__(self, min_match: int, max_match: int) -> None:
        super().__init__(min(min_match, _LONGEST), min(max_match, _LONGEST))


def draft(texts: Sequence[LookupText], most: Sequence[int]) -> tuple[Tensor, list[int]]:
    """The last token of each text, none of them empty, and, where its end occurred before, the
    most[i] that followed -> int64 [B, 1 + the largest of most], padded with 0, and how many of each
    row these are."""
    places, limits, counts = pointers(texts), array("q", most), array("q", most)
    drafts = torch.empty(len(texts), 1 + max(most), dtype=torch.int64)
    given = address(places), address(limits), *drafts.shape, drafts.data_ptr()
    _function("texts_draft")(*given, address(counts))
    return drafts, counts.tolist()
