"""From a match to the tree of its likely continuations (SuffixDecoding, Oliaro et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, nlargest
from itertools import islice

from specengine.core.config import SpecConfig
from specengine.draft.proposals import Draft, chain_parents
from specengine.draft.rotating_corpus import until_separator
from specengine.draft.suffix.match import Match
from specengine.draft.suffix.tree import Child, Node

# Suffixes of a match whose continuations are compared.
MAX_SUFFIXES = 2
# Children looked at for the best few. They are in the order in which they first occurred, so that
# frequent ones tend to be in front; the best of all is known without looking.
_MAX_CHILDREN = 64


def draft_sizes(spec: SpecConfig) -> list[int]:
    """By the length of a match, from 0 on: the most tokens drafted from it."""
    lengths = range(1, spec.suffix_max_depth)
    return [0, *(int(spec.suffix_factor * n + spec.suffix_offset) for n in lengths)]


class Expander:
    """Drafts what followed a match elsewhere: the tokens of the largest path probability, which is
    the product of count(child) / count(node) down to them."""

    def __init__(self, spec: SpecConfig) -> None:
        self._min_prob = spec.suffix_min_prob
        self._branches = spec.suffix_branches
        self._sizes = draft_sizes(spec)

    def best(self, root: int, match: Match, max_tokens: int) -> Draft:
        """The draft from the suffix of the match that promises the most accepted tokens, were
        frequencies probabilities.

        A shorter suffix is more frequent, but may draft less; one that occurred no more often than
        the longer promises nothing new.
        """
        best, score, count, tried = Draft([root], None, [1.0]), 0.0, 0, 0
        room = min(max_tokens, self._sizes[match.length])
        while room > score and tried < MAX_SUFFIXES:
            below = match.below
            before, count = count, 1 if isinstance(below, int) else below.count
            if count != before:
                tried += 1
                draft = self._expand(root, match, below, room)
                if (expected := draft.num_expected) > score:
                    best, score = draft, expected
            room = min(max_tokens, self._sizes[match.length - 1])
            if room > score:
                match = match.shortened()
        return best

    def _expand(self, root: int, match: Match, below: Child, max_tokens: int) -> Draft:
        """The most probable nodes below the match, best first."""
        if self._branches == 1:
            return self._chain(root, match, below, max_tokens)
        return self._tree(root, match, below, max_tokens)

    def _chain(self, root: int, match: Match, child: Child, max_tokens: int) -> Draft:
        tokens, probs, depth, prob = [root], [1.0], match.length, 1.0
        text, end = match.tree.tokens, max_tokens + 1
        while len(tokens) < end:
            if isinstance(child, int) or not child.children:
                run = _read_on(match, child, depth, end - len(tokens))
                return Draft(tokens + run, None, probs + [prob] * len(run))
            tokens += text[child.start + depth : child.start + child.depth]
            probs += [prob] * (child.depth - depth)
            prob *= child.best_count / child.count
            if prob < self._min_prob:
                break
            depth, child = child.depth, child.children[child.best]
        return Draft(tokens[:end], None, probs[:end])

    def _tree(self, root: int, match: Match, below: Child, max_tokens: int) -> Draft:
        tokens, parents, probs, order = [root], [-1], [1.0], 0
        # (-probability, order, child, tokens of its path read so far, node that its path goes on)
        frontier: list[tuple[float, int, Child, int, int]] = [(-1.0, 0, below, match.length, 0)]
        while frontier and (room := max_tokens + 1 - len(tokens)):
            negative, _, child, depth, node = heappop(frontier)
            for token in _read(match, child, depth, room):
                parents.append(node)
                node = len(tokens)
                tokens.append(token)
                probs.append(-negative)
            if isinstance(child, int):
                continue
            for prob, longer in self._likely(child, -negative):
                order += 1
                heappush(frontier, (-prob, order, longer, child.depth, node))
        is_chain = parents == chain_parents(len(tokens))
        return Draft(tokens, None if is_chain else parents, probs)

    def _likely(self, node: Node, prob: float) -> Iterator[tuple[float, Child]]:
        """Path probability and child of the branches worth trying, best first."""
        if prob * node.best_count < self._min_prob * node.count:
            return
        keys = dict.fromkeys([node.best, *islice(node.children, _MAX_CHILDREN)])
        counted = [_counted(node.children[key]) for key in keys]
        for count, _, child in nlargest(self._branches, counted):
            longer = prob * count / node.count
            if longer >= self._min_prob:
                yield longer, child


def _counted(child: Child) -> tuple[int, int, Child]:
    """Count and latest occurrence, which no two children of a node share, and the child."""
    return (1, child, child) if isinstance(child, int) else (child.count, child.start, child)


def _read(match: Match, child: Child, depth: int, room: int) -> list[int]:
    """The tokens of a child's path from `depth` on, up to where it parts again."""
    if isinstance(child, int) or not child.children:
        return _read_on(match, child, depth, room)
    return match.tree.tokens[child.start + depth : child.start + min(child.depth, depth + room)]


def _read_on(match: Match, child: Child, depth: int, room: int) -> list[int]:
    """The text after the latest occurrence of a path that never parts again."""
    tokens, start = match.tree.tokens, child if isinstance(child, int) else child.start
    run = tokens[start + depth : start + depth + room]
    if len(run) < room:
        run = _repeat(tokens[start + match.length :], depth - match.length, room)
    return until_separator(run) if min(run) < 0 else run


def _repeat(period: list[int], offset: int, count: int) -> list[int]:
    """A continuation that runs into the end of the text reads on in what it has drafted: the text
    since the occurrence repeats."""
    repeats = -(-(offset + count) // len(period))
    return (period * repeats)[offset : offset + count]
