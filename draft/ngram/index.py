"""Earlier occurrences of the end of a text, in time that hardly grows with the text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import TypeVar

K = TypeVar("K")

_MOST_WHOLE = 256  # ends that may wait for a split: a lookup is over soon


class _Node:
    """A context that occurred more than once: where it ended, ascending, and the contexts one token
    longer, by the token in front. These have the first `num_split` ends."""

    __slots__ = ("children", "ends", "num_split")

    def __init__(self, *ends: int) -> None:
        self.ends = list(ends)
        self.children: dict[int, int | _Node] = {}
        self.num_split = 0


class NgramIndex:
    """A trie of the contexts of min_match to max_match tokens in a growing text, read backwards.

    A token costs one entry, of its shortest context. A context is split into longer ones when a
    lookup comes by, or when many of its ends wait for that; each of them once. Contexts that
    occurred once are never split. A position is indexed once a token follows it.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self.min_match = min_match
        self.max_match = max_match
        self.tokens: list[int] = []
        # A context seen once is just the position of its last token.
        self._contexts: dict[tuple[int, ...], int | _Node] = {}

    def extend(self, new: Sequence[int]) -> None:
        depth = self.min_match
        first = max(len(self.tokens), depth)
        self.tokens.extend(new)
        window = self.tokens[first - depth : -1]
        keys = zip(*(window[start:] for start in range(depth)), strict=False)
        self._add(self._contexts, keys, range(first - 1, len(self.tokens) - 1), depth)

    def lookup(self, tail: Sequence[int]) -> Iterator[int]:
        """Positions where a context ended that `tail` ends in too, the longest shared context
        first, then the most recent. Contexts longer than max_match count as max_match. To be read
        before the text grows."""
        deepest = min(self.max_match, len(tail))
        shortest = tuple(tail[-self.min_match :])
        top = self._contexts.get(shortest) if deepest >= self.min_match else None
        if not isinstance(top, _Node):
            if top is not None:
                yield top
            return
        seen: set[int] = set()
        latest, whole = top.ends[-1], list(tail[-deepest:])
        start = latest + 1 - deepest
        if start >= 0 and self.tokens[start : latest + 1] == whole:
            # Of text that repeats itself a chain takes no more, and no context need be split.
            seen.add(latest)
            yield latest
        for entry in reversed(self._path(top, whole)):
            for end in (entry,) if isinstance(entry, int) else reversed(entry.ends):
                if end not in seen:
                    seen.add(end)
                    yield end

    def _path(self, node: _Node, tail: Sequence[int]) -> list[int | _Node]:
        """The entries of tail's contexts, shortest first, from that of min_match tokens on."""
        path: list[int | _Node] = [node]
        for depth in range(self.min_match, len(tail)):
            self._split(node, depth)
            entry = node.children.get(tail[-1 - depth])
            if entry is not None:
                path.append(entry)
            if not isinstance(entry, _Node):
                break
            node = entry
        return path

    def _add(
        self,
        contexts: MutableMapping[K, int | _Node],
        keys: Iterable[K],
        ends: Iterable[int],
        depth: int,
    ) -> None:
        """Where each of these contexts of `depth` tokens ended once more."""
        for key, end in zip(keys, ends, strict=True):
            entry = contexts.setdefault(key, end)
            if entry is end:
                continue
            if isinstance(entry, int):
                contexts[key] = _Node(entry, end)
                continue
            entry.ends.append(end)
            if depth < self.max_match and len(entry.ends) - entry.num_split >= _MOST_WHOLE:
                self._split(entry, depth)

    def _split(self, node: _Node, depth: int) -> None:
        """The ends of a context of `depth` tokens that its longer ones do not have."""
        ends = [end for end in node.ends[node.num_split :] if end >= depth]
        node.num_split = len(node.ends)
        fronts = [self.tokens[end - depth] for end in ends]
        self._add(node.children, fronts, ends, depth + 1)
