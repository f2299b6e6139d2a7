"""Earlier occurrences of the end of a text, in time that does not grow with the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_MANY = 6  # tokens; so many are sooner read by columns than one by one


class _Node:
    """A context that occurred more than once: where it ended, ascending, and the contexts one token
    longer, by the token in front."""

    __slots__ = ("children", "ends")

    def __init__(self, end: int) -> None:
        self.ends = [end]
        self.children: _Contexts = {}


# A context seen once is just the position of its last token.
_Contexts = dict[int | tuple[int, ...], int | _Node]


class NgramIndex:
    """A trie of the contexts of min_match to max_match tokens in a growing text, read backwards.

    Contexts are split only as far as they repeat, so that text without repetition costs one entry a
    token, and a lookup max_match steps at most. A position is indexed once a token follows it.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self.min_match = min_match
        self.max_match = max_match
        self.tokens: list[int] = []
        self._contexts: _Contexts = {}

    def extend(self, new: Sequence[int]) -> None:
        tokens, depth, contexts = self.tokens, self.min_match, self._contexts
        first = max(len(tokens), depth)
        tokens.extend(new)
        if len(new) < _MANY:
            for end in range(first, len(tokens)):
                self._add(tuple(tokens[end - depth : end]), end - 1)
        else:
            window = tokens[first - depth : -1]
            columns = [window[start:] for start in range(depth)]
            for end, key in enumerate(zip(*columns, strict=False), first - 1):
                if contexts.setdefault(key, end) is not end:
                    self._add(key, end)

    def lookup(self, tail: Sequence[int]) -> Iterator[int]:
        """Positions where a context ended that `tail` ends in too, the longest shared context
        first, then the most recent. Contexts longer than max_match count as max_match."""
        seen: set[int] = set()
        for entry in reversed(self._path(tail)):
            for end in (entry,) if isinstance(entry, int) else reversed(entry.ends):
                if end not in seen:
                    seen.add(end)
                    yield end

    def _path(self, tail: Sequence[int]) -> list[int | _Node]:
        """The entries of tail's contexts, shortest first."""
        path: list[int | _Node] = []
        depth, deepest = self.min_match, min(self.max_match, len(tail))
        if depth > deepest:
            return path
        entry = self._contexts.get(tuple(tail[-depth:]))
        while entry is not None:
            path.append(entry)
            if isinstance(entry, int) or depth == deepest:
                break
            depth += 1
            entry = entry.children.get(tail[-depth])
        return path

    def _add(self, key: int | tuple[int, ...], end: int) -> None:
        """key: the context of min_match tokens that ends there."""
        contexts, depth = self._contexts, self.min_match
        while (entry := contexts.setdefault(key, end)) is not end:
            if isinstance(entry, int):
                contexts[key] = entry = self._split(entry, depth)
            entry.ends.append(end)
            if depth == self.max_match or depth > end:
                return
            contexts, key, depth = entry.children, self.tokens[end - depth], depth + 1

    def _split(self, end: int, depth: int) -> _Node:
        """Room for a second occurrence of the context of `depth` tokens that ended at `end`."""
        node = _Node(end)
        if depth < self.max_match and depth <= end:
            node.children[self.tokens[end - depth]] = end
        return node
