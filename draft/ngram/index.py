"""Earlier occurrences of the end of a text, in time that does not grow with the text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import TypeVar

K = TypeVar("K")


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

    A token costs one entry, of its shortest context; a context is split into longer ones when a
    lookup comes by, each of its ends once. Contexts that occurred once are never split. A position
    is indexed once a token follows it.
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
        columns = [window[start:] for start in range(depth)]
        _add(self._contexts, zip(*columns, strict=False), range(first - 1, len(self.tokens) - 1))

    def lookup(self, tail: Sequence[int]) -> Iterator[int]:
        """Positions where a context ended that `tail` ends in too, the longest shared context
        first, then the most recent. Contexts longer than max_match count as max_match."""
        deepest = min(self.max_match, len(tail))
        shortest = tail[-self.min_match :]
        entry = self._contexts.get(tuple(shortest)) if deepest >= self.min_match else None
        if not isinstance(entry, _Node):
            if entry is not None:
                yield entry
            return
        seen: set[int] = set()
        latest, whole = entry.ends[-1], list(tail[-deepest:])
        start = latest + 1 - deepest
        if start >= 0 and self.tokens[start : latest + 1] == whole:
            # Of text that repeats itself nobody asks for more, and no context need be split.
            seen.add(latest)
            yield latest
        for entry in reversed(self._path(entry, whole)):
            for end in (entry,) if isinstance(entry, int) else reversed(entry.ends):
                if end not in seen:
                    seen.add(end)
                    yield end

    def _path(self, node: _Node, tail: Sequence[int]) -> list[int | _Node]:
        """The entries of tail's contexts, shortest first, from that of min_match tokens on."""
        path: list[int | _Node] = [node]
        for depth in range(self.min_match, len(tail)):
            ends = [end for end in node.ends[node.num_split :] if end >= depth]
            node.num_split = len(node.ends)
            _add(node.children, [self.tokens[end - depth] for end in ends], ends)
            entry = node.children.get(tail[-1 - depth])
            if entry is not None:
                path.append(entry)
            if not isinstance(entry, _Node):
                break
            node = entry
        return path


def _add(contexts: MutableMapping[K, int | _Node], keys: Iterable[K], ends: Iterable[int]) -> None:
    """Where each of these contexts ended once more."""
    for key, end in zip(keys, ends, strict=True):
        entry = contexts.setdefault(key, end)
        if entry is end:
            continue
        if isinstance(entry, int):
            contexts[key] = _Node(entry, end)
        else:
            entry.ends.append(end)
