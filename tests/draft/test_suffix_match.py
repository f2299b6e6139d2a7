"""Following one text in the tree of another, against a brute-force search."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.draft.suffix.match import Follower, Match
from specengine.draft.suffix.tree import SuffixTree

TOKENS = st.lists(st.integers(0, 2), max_size=12)


def longest(text: list[int], other: list[int], below: int) -> int:
    """Length of the longest suffix of text that other contains."""
    for length in range(min(below - 1, len(text)), 0, -1):
        tail = text[len(text) - length :]
        if any(other[i : i + length] == tail for i in range(len(other))):
            return length
    return 0


def check(match: Match, text: list[int]) -> None:
    tree, length = match.tree, match.length
    assert length == longest(text, tree.tokens, tree.max_depth)
    assert tree.tokens[match.start : match.start + length] == text[len(text) - length :]
    assert match.node is tree.deepest(tree.root, length, match.start)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6), st.sampled_from([2, 3, 5, 8, 64])
)
def test_the_longest_suffix_while_both_grow(
    steps: list[tuple[list[int], list[int]]], max_depth: int
) -> None:
    tree, text = SuffixTree(max_depth), [0]
    follower = Follower(tree)
    follower.follow(text, 1)
    for number, (theirs, ours) in enumerate(steps):
        tree.extend([*theirs, -1 - number])
        text += ours
        follower.follow(text, len(ours))
        check(follower.match, text)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=40), st.sampled_from([3, 5, 64]))
def test_shortened_down_to_nothing(text: list[int], max_depth: int) -> None:
    tree = SuffixTree(max_depth)
    tree.extend(text)
    match = Match.own(tree)
    while match.length:
        match = match.shortened()
        assert match.node is tree.deepest(tree.root, match.length, match.start)
        assert match.start + match.length == len(text)
    assert match.node is tree.root
