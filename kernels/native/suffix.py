"""Suffix trees of texts and the chains that they promise, compiled from suffix.c."""

from __future__ import annotations

import ctypes
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

_LONGEST = 1 << 30  # draft, in tokens
_FUNCTIONS: Signatures = {
    "text_new": (POINTER, [INT]),
    "text_free": (None, [POINTER]),
    "text_match_length": (INT, [POINTER]),
    "texts_longest_match": (INT, [POINTER, COUNT]),
    "texts_extend": (COUNT, [POINTER, POINTER, POINTER, COUNT]),
    "texts_draft": (None, [POINTER, POINTER, COUNT, COUNT, POINTER, POINTER, POINTER, POINTER]),
}
_function = functions_of("suffix", _FUNCTIONS)


def is_compiled() -> bool:
    compiled = library("suffix")
    return compiled is not None


class SuffixText(NativeText):
    """The suffix tree of a text that grows (`texts.extend`) and says what might follow (`draft`).
    Counts substrings of max_depth tokens at most. Raises MemoryError."""

    __slots__ = ()

    @staticmethod
    def functions(name: str) -> Any:
        return _function(name)

    def __init__(self, max_depth: int) -> None:
        super().__init__(max_depth)

    @property
    def match_length(self) -> int:
        """The length of the longest suffix seen before, in tokens, below max_depth."""
        length: int = _function("text_match_length")(self.pointer)
        return length

    def draft(self, most: int, rules: ChainRules) -> tuple[list[int], list[float]]:
        """The last token and at most so many that might follow; of each the probability that the
        text goes on up to it. The text is not empty."""
        width = _width([most], rules)
        tokens, probs = array("q", [0]) * width, array("d", [0.0]) * width
        counts = _draft([self], [most], width, rules, address(tokens), address(probs))
        return tokens[: counts[0]].tolist(), probs[: counts[0]].tolist()


class _Rules(ctypes.Structure):
    _fields_ = (
        ("sizes", POINTER),
        ("min_prob", ctypes.c_double),
        ("max_suffixes", INT),
        ("is_compensated", INT),
        ("min_match", INT),
    )


class ChainRules:
    """sizes: by the length of a match, from 0 to max_depth - 1, the most tokens drafted from it, of
    an empty one none. min_prob: the least probability of a token. max_suffixes: how many suffixes
    of the text that occurred unequally often are compared. min_match: if even the longest of them
    is shorter, nothing is drafted."""

    def __init__(
        self, sizes: Sequence[int], min_prob: float, max_suffixes: int, min_match: int = 0
    ) -> None:
        self.longest = min(max(sizes), _LONGEST)
        self._sizes = array("i", [max(0, min(size, _LONGEST)) for size in sizes])
        is_compensated = sum([1.0, 1e100, 1.0, -1e100]) != 0.0
        limits = max_suffixes, is_compensated, min_match
        self._rules = _Rules(address(self._sizes), min_prob, *limits)
        self.address = ctypes.addressof(self._rules)  # valid while these rules are kept


def longest_match(texts: Sequence[SuffixText]) -> int:
    """The largest match_length of them."""
    places = pointers(texts)
    length: int = _function("texts_longest_match")(address(places), len(texts))
    return length


def draft(
    texts: Sequence[SuffixText], most: Sequence[int], rules: ChainRules
) -> tuple[Tensor, Tensor, list[int]]:
    """The last token of each text, none of them empty, and at most most[i] that might follow ->
    int64 [B, N], padded with 0; their probabilities, float32 [B, N]; and how many of each row
    these are, at least 1, at most N."""
    shape = len(texts), _width(most, rules)
    drafts, probs = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float64)
    counts = _draft(texts, most, shape[1], rules, drafts.data_ptr(), probs.data_ptr())
    return drafts, probs.float(), counts.tolist()


def _width(most: Sequence[int], rules: ChainRules) -> int:
    """Tokens of the longest draft, root included."""
    return 1 + max(0, min(max(most), rules.longest))


def _draft(
    texts: Sequence[SuffixText],
    most: Sequence[int],
    width: int,
    rules: ChainRules,
    drafts: int,
    probs: int,
) -> array[int]:
    """Into the memory at the addresses `drafts` and `probs` -> how many nodes each."""
    places, limits, counts = pointers(texts), array("q", most), array("q", most)
    given = address(places), address(limits), len(texts), width, rules.address
    _function("texts_draft")(*given, drafts, probs, address(counts))
    return counts
