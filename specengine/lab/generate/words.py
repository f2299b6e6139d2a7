"""Texts as words: duplicates, and what must not be learned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

_WORD = re.compile(r"\w+")

# Words in a row that two texts must share to resemble each other, and how many of a text's
# smallest hashes stand for it (a bottom sketch: Broder 1997, "On the resemblance").
SHINGLE = 8
SKETCH = 8


def words_of(text: str) -> list[str]:
    """Lower case, without punctuation."""
    return _WORD.findall(text.lower())


def hash_words(words: Sequence[str]) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(blake2b(" ".join(words).encode(), digest_size=8).digest(), "big")


def hash_runs(words: Sequence[str], size: int) -> set[int]:
    """A hash of every `size` words in a row; of all of them where there are fewer."""
    last = max(len(words) - size, 0)
    return {hash_words(words[start : start + size]) for start in range(last + 1)}


class SeenTexts:
    """Finds texts that were seen before: the same words, or half of a text's sketch or more."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def load(self, keys: Iterable[int]) -> None:
        """Those that earlier calls of `add` gave."""
        self._seen.update(keys)

    def add(self, words: Sequence[str]) -> list[int]:
        """The keys of a new text, or nothing for one that resembles an earlier text."""
        whole = hash_words(words)
        sketch = sorted(hash_runs(words, SHINGLE))[:SKETCH] if len(words) > SHINGLE else []
        known = sum(key in self._seen for key in sketch)
        if whole in self._seen or 2 * known > len(sketch):
            return []
        keys = [whole, *sketch]
        self._seen.update(keys)
        return keys


class ForbiddenTexts:
    """Texts that share `size` words in a row with one of `texts` (or the whole of a shorter one),
    as GPT-3's authors cleaned their data (Brown et al. 2020, appendix C)."""

    def __init__(self, texts: Iterable[str], size: int) -> None:
        self._size = size
        self._runs: set[tuple[str, ...]] = set()
        self._short: set[str] = set()
        for words in map(words_of, texts):
            if len(words) >= size:
                self._runs.update(self._runs_of(words))
            elif words:
                self._short.add(_spaced(words))

    def occurs_in(self, words: Sequence[str]) -> bool:
        text = _spaced(words)
        return any(short in text for short in self._short) or any(
            run in self._runs for run in self._runs_of(words)
        )

    def _runs_of(self, words: Sequence[str]) -> Iterator[tuple[str, ...]]:
        return zip(*(words[start:] for start in range(self._size)), strict=False)


def _spaced(words: Sequence[str]) -> str:
    return f" {' '.join(words)} "
