"""Continuations merged into one draft."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from specengine.draft.proposals import Draft, chain_parents

_MAX_OCCURRENCES = 16  # looked at for distinct continuations; bounds the cost of frequent contexts


def merge(root: int, branches: list[list[int]], max_nodes: int) -> Draft:
    """A trie of the branches, one level after the other, the better branch first on each level,
    until max_nodes are taken: branches that agree go deep, branches that differ share the budget.
    """
    if len(branches) < 2:
        return Draft([root, *chain.from_iterable(branches)][:max_nodes])
    tokens, parents = [root], [-1]
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    at = [0] * len(branches)
    for depth in range(max(map(len, branches))):
        for i, branch in enumerate(branches):
            if depth >= len(branch):
                continue
            key = (at[i], branch[depth])
            if key not in nodes:
                if len(tokens) == max_nodes:
                    return _draft(tokens, parents)
                nodes[key] = len(tokens)
                tokens.append(branch[depth])
                parents.append(at[i])
            at[i] = nodes[key]
    return _draft(tokens, parents)


def _draft(tokens: list[int], parents: list[int]) -> Draft:
    return Draft(tokens, None if parents == chain_parents(len(tokens)) else parents)


def distinct(continuations: Iterable[list[int]], count: int) -> list[list[int]]:
    """The first `count` different continuations."""
    chosen: list[list[int]] = []
    for continuation in islice(continuations, _MAX_OCCURRENCES):
        if continuation not in chosen:
            chosen.append(continuation)
            if len(chosen) == count:
                break
    return chosen
