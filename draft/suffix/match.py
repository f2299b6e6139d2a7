"""Where the end of a text was seen before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specengine.draft.suffix.tree import Child, Node, SuffixTree


@dataclass(slots=True)
class Match:
    """A substring that a tree has counted: tree.tokens[start : start + length] is an occurrence,
    and `node` the deepest node on its path."""

    tree: SuffixTree
    node: Node
    length: int
    start: int

    @classmethod
    def own(cls, tree: SuffixTree) -> Match:
        """The longest suffix of the tree's own text that occurred before."""
        return cls(tree, tree.node, tree.length, len(tree.tokens) - tree.length)

    @property
    def below(self) -> Child:
        """What the path leads to: the child on whose edge the match ends, or else the node."""
        if self.length == self.node.depth:
            return self.node
        return self.node.children[self.tree.tokens[self.start + self.node.depth]]

    def shortened(self) -> Match:
        """The match without its first token."""
        length, start = self.length - 1, self.start + 1
        return Match(self.tree, self.tree.deepest(self.node.link, length, start), length, start)


class Follower:
    """The longest suffix of one text that the tree of another has counted, below max_depth tokens,
    while both texts grow. The tree's text must end in a token that it holds nowhere else.
    """

    def __init__(self, tree: SuffixTree) -> None:
        self.match = Match(tree, tree.root, 0, 0)
        self._tree_size = 0  # of the tree's text when last looked at

    def follow(self, text: list[int], num_new: int) -> None:
        """Take in the last num_new tokens of the text, all others having been taken in before."""
        match, tree = self.match, self.match.tree
        if self._tree_size != len(tree.tokens):
            self._tree_size = len(tree.tokens)
            if self._is_outgrown(text, num_new):
                num_new = tree.max_depth
            match.node = tree.deepest(match.node, match.length, match.start)
        if num_new >= tree.max_depth:
            num_new = tree.max_depth - 1
            match = Match(tree, tree.root, 0, 0)
        self.match = advance(match, text[max(0, len(text) - num_new) :])

    def _is_outgrown(self, text: list[int], num_new: int) -> bool:
        """Whether the match can be longer by now, which it can if and only if by one token."""
        length, end = self.match.length + 1, len(text) - num_new
        tail = text[max(0, end - length) : end]
        return len(tail) == length < self.match.tree.max_depth and self.match.tree.contains(tail)


def advance(match: Match, new: Iterable[int]) -> Match:
    """The match of a text that goes on with `new`: after each token the longest suffix of the old
    one that goes on with it too."""
    tree, node, length, start = match.tree, match.node, match.length, match.start
    tokens = tree.tokens
    for token in new:
        while True:
            key = token if length == node.depth else tokens[start + node.depth]
            child = node.children.get(key)
            if child is not None:
                begin = child if isinstance(child, int) else child.start
                if tokens[begin + length] == token:
                    start, length = begin, length + 1
                    break
            if length == 0:
                break
            start, length = start + 1, length - 1
            node = tree.deepest(node.link, length, start)
        if length == tree.max_depth:
            start, length = start + 1, length - 1
            node = node.link
        node = tree.deepest(node, length, start)
    return Match(tree, node, length, start)
