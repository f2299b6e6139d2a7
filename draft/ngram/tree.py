"""Continuations merged into one draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

_MAX_OCCURRENCES = 16  # looked at for distinct continuations; bounds the cost of frequent contexts


@dataclass(frozen=True)
class Draft:
    """Nodes of one request: the root first, parents before children."""

    tokens: list[int]
    parents: list[int]

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))


def merge(root: int, branches: list[list[int]], max_nodes: int) -> Draft:
    """A trie of the branches, one level after the other, the better branch first on each level,
    until max_nodes are taken: branches that agree go deep, branches that differ share the budget.
    """
    if len(branches) == 1:
        tokens = [root, *branches[0]][:max_nodes]
        return Draft(tokens, list(range(-1, len(tokens) - 1)))
    tokens, parents = [root], [-1]
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    at = [0] * len(branches)
    for depth in range(max(map(len, branches), default=0)):
        for i, branch in enumerate(branches):
            if depth >= len(branch):
                continue
            key = (at[i], branch[depth])
            if key not in nodes:
                if len(tokens) == max_nodes:
                    return Draft(tokens, parents)
                nodes[key] = len(tokens)
                tokens.append(branch[depth])
                parents.append(at[i])
            at[i] = nodes[key]
    return Draft(tokens, parents)


def distinct(continuations: Iterable[list[int]], count: int) -> list[list[int]]:
    """The first `count` different continuations."""
    chosen: list[list[int]] = []
    for continuation in islice(continuations, _MAX_OCCURRENCES):
        if continuation not in chosen:
            chosen.append(continuation)
            if len(chosen) == count:
                break
    return chosen
