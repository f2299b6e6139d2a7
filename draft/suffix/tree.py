"""A suffix tree that grows with its text and counts what it has seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias


class Node:
    """A substring after which the text went on in different ways, or one of max_depth tokens.

    start: where its latest counted occurrence begins. depth: its length in tokens. children: by the
    token that follows the substring. best: the key of the child with the largest count, the latest
    among equals; best_count is that count. link: the node of the same substring without its first
    token, known for every node that has children. The root is no substring, and counts nothing.
    """

    __slots__ = ("best", "best_count", "children", "count", "depth", "link", "parent", "start")

    def __init__(self, start: int, depth: int, count: int, parent: Node | None) -> None:
        self.start = start
        self.depth = depth
        self.count = count
        self.parent = parent
        self.children: dict[int, Child] = {}
        self.best = 0
        self.best_count = 0
        self.link: Node = self


# What occurred once is just the position where it begins, and reaches down to max_depth.
Child: TypeAlias = int | Node


class SuffixTree:
    """Every substring of 1 .. max_depth tokens, with the number of its occurrences (Ukkonen 1995).
    Amortised O(1) to build, and at most max_depth steps to count, a token.

    A position is counted as soon as no earlier text reads like the text after it, or max_depth
    tokens follow it. Those not counted yet begin inside the longest repeated suffix, which is kept
    as `node`, the deepest node on its path, and `length`, below max_depth.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.tokens: list[int] = []
        self.root = Node(0, 0, 0, None)
        self.node = self.root
        self.length = 0

    def extend(self, new: Iterable[int]) -> None:
        for token in new:
            self._append(token)

    def deepest(self, node: Node, length: int, start: int) -> Node:
        """The deepest node on the path of tokens[start : start + length], at or below `node`."""
        while node.depth < length:
            child = node.children[self.tokens[start + node.depth]]
            if isinstance(child, int) or child.depth > length:
                break
            node = child
        return node

    def contains(self, substring: Sequence[int]) -> bool:
        """Whether a substring of 1 .. max_depth tokens is on a counted path."""
        node, length = self.root, len(substring)
        while True:
            child = node.children.get(substring[node.depth])
            if child is None:
                return False
            start, stop = (child, length) if isinstance(child, int) else (child.start, child.depth)
            stop = min(stop, length)
            if self.tokens[start + node.depth : start + stop] != substring[node.depth : stop]:
                return False
            if isinstance(child, int) or stop == length:
                return True
            node = child

    def _append(self, token: int) -> None:
        """Lengthen the repeated suffix by the token, or else count it and go on with the next
        shorter one."""
        tokens, end = self.tokens, len(self.tokens)
        tokens.append(token)
        node, length = self.node, self.length
        unlinked: Node | None = None  # a fork whose link is the node that comes next
        while True:
            key = tokens[end - length + node.depth]
            child = node.children.get(key)
            fork = None
            if child is not None:
                if length == node.depth:
                    break
                start = child if isinstance(child, int) else child.start
                if tokens[start + length] == token:
                    break
                fork = self._fork(node, key, child, length)
            end_node = fork or node
            if unlinked is not None:
                unlinked.link = end_node
            unlinked = fork
            end_node.children[token] = end - length
            self._count(end_node, token, 1, end - length)
            if length == 0:
                self.node, self.length = self.root, 0
                return
            length -= 1
            node = self.deepest(node.link, length, end - length)
        if unlinked is not None:
            unlinked.link = node
        self._lengthen(node, key, child, length + 1)

    def _fork(self, node: Node, key: int, child: Child, depth: int) -> Node:
        """A new node on the edge from `node` to `child`."""
        if isinstance(child, int):
            fork = Node(child, depth, 1, node)
        else:
            fork = child.parent = Node(child.start, depth, child.count, node)
        fork.best, fork.best_count = self.tokens[fork.start + depth], fork.count
        fork.children[fork.best] = child
        node.children[key] = fork
        return fork

    def _lengthen(self, node: Node, key: int, child: Child, length: int) -> None:
        """Make the repeated suffix the one of `length` tokens that ends on the edge to `child`, or
        count it where that is max_depth."""
        if length == self.max_depth:
            start = len(self.tokens) - length
            if isinstance(child, int):
                child = node.children[key] = Node(start, length, 1, node)
            child.count += 1
            child.start = start
            self._count(node, key, child.count, start)
            length -= 1
            node = self.deepest(node.link, length, start + 1)
        elif not isinstance(child, int) and child.depth == length:
            node = child
        self.node, self.length = node, length

    def _count(self, node: Node, key: int, count: int, start: int) -> None:
        """Add the occurrence that begins at `start` to `node` and to all nodes above it; the child
        below, at `key`, has it already and counts `count` now."""
        tokens = self.tokens
        while (parent := node.parent) is not None:
            if count >= node.best_count:
                node.best, node.best_count = key, count
            node.count = count = node.count + 1
            node.start = start
            key = tokens[start + parent.depth]
            node = parent
