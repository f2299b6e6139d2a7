"""Drafts from a match against a brute-force reading of its occurrences."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.core.config import SpecConfig
from specengine.draft.proposals import Draft
from specengine.draft.suffix.expand import Expander
from specengine.draft.suffix.match import Match
from specengine.draft.suffix.tree import SuffixTree

HORIZON = 12  # tokens that a reference continuation is read on for
Path = tuple[int, ...]


def tree_of(text: list[int], max_depth: int = 64) -> SuffixTree:
    tree = SuffixTree(max_depth)
    tree.extend(text)
    return tree


def expander(branches: int = 1, min_prob: float = 0.01, factor: float = 99.0) -> Expander:
    return Expander(
        SpecConfig(
            suffix_branches=branches,
            suffix_min_prob=min_prob,
            suffix_factor=factor,
            suffix_offset=0.0,
        )
    )


def continuations(text: list[int], length: int) -> list[Path]:
    """What followed each earlier occurrence of the longest repeated suffix, oldest first. One that
    runs into the end of the text repeats what it has read."""
    found = []
    for end in range(length, len(text)):
        if text[end - length : end] == text[len(text) - length :]:
            period = text[end:]
            found.append(tuple((period * HORIZON)[:HORIZON]))
    return found


def path_probs(draft: Draft) -> dict[Path, float]:
    parents = draft.parents or list(range(-1, len(draft.tokens) - 1))
    assert draft.confidence is not None
    paths: list[Path] = [()]
    for node in range(1, len(draft.tokens)):
        assert 0 <= parents[node] < node
        paths.append((*paths[parents[node]], draft.tokens[node]))
    assert len(set(paths)) == len(paths), "equal siblings"
    return dict(zip(paths, draft.confidence, strict=True))


def greedy_total(found: list[Path], branches: int, min_prob: float, max_tokens: int) -> float:
    """Sum of the path probabilities of the best max_tokens nodes, taken one by one."""
    total, taken = 0.0, 0
    frontier: list[tuple[float, Path]] = [(1.0, ())]
    while frontier and taken <= max_tokens:
        prob, path = frontier.pop(frontier.index(max(frontier)))
        if path:
            total += prob
        taken += 1
        counts: dict[int, int] = defaultdict(int)
        for one in found:
            if one[: len(path)] == path and len(path) < HORIZON:
                counts[one[len(path)]] += 1
        best = sorted(counts.items(), key=lambda item: -item[1])[:branches]
        likely = [(count / len(found), (*path, token)) for token, count in best]
        frontier += [one for one in likely if one[0] >= min_prob - 1e-9]
    return total


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.sampled_from([2, 4]),
    st.sampled_from([0.01, 0.2, 0.35]),
    st.integers(1, HORIZON - 1),
)
def test_the_most_probable_paths(
    text: list[int], branches: int, min_prob: float, max_tokens: int
) -> None:
    tree = tree_of(text)
    match = Match.own(tree)
    if match.length == 0:
        return
    draft = expander(branches, min_prob)._expand(7, match, match.below, max_tokens)
    found = continuations(text, match.length)
    probs = path_probs(draft)
    for path, prob in probs.items():
        share = sum(one[: len(path)] == path for one in found) / len(found)
        assert prob == pytest.approx(share)
    assert len(draft.tokens) <= max_tokens + 1
    if branches == 4:  # fewer may choose between equals, whose paths go on differently
        expected = greedy_total(found, branches, min_prob, max_tokens)
        assert draft.num_expected == pytest.approx(expected)
    counts: dict[Path, int] = defaultdict(int)
    for path in probs:
        counts[path[:-1]] += bool(path)
    assert max(counts.values()) <= branches
    ordered = list(probs.values())
    assert ordered == sorted(ordered, reverse=True), "the first n nodes are the best n"


@settings(max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, HORIZON - 1))
def test_a_chain_takes_the_most_frequent_then_latest(text: list[int], max_tokens: int) -> None:
    match = Match.own(tree_of(text))
    if match.length == 0:
        return
    draft = expander()._expand(7, match, match.below, max_tokens)
    found = continuations(text, match.length)
    expected: Path = ()
    for _ in range(max_tokens):
        left = [one for one in found if one[: len(expected)] == expected]
        ranked = [
            (sum(o[len(expected)] == t[len(expected)] for o in left), i, t)
            for i, t in enumerate(left)
        ]
        expected = (*expected, max(ranked)[2][len(expected)])
    assert draft.parents is None
    assert draft.tokens[1:] == list(expected[: len(draft.tokens) - 1])


LATEST_ODD = [1, 2, 3, 0, 9, 2, 3, 5, 6, 8, 2, 3, 5, 6, 1, 2, 4, 7, 1, 2]


def test_a_shorter_suffix_that_promises_more_is_taken() -> None:
    """1 2 went on with 3 or 4; 2 alone three times with 3, and with 3 5 6 twice."""
    match = Match.own(tree_of(LATEST_ODD))
    draft = expander().best(2, match, 3)
    assert draft.tokens == [2, 3, 5, 6]
    assert draft.confidence == [1.0, 0.75, 0.5, 0.5]


def test_a_shorter_suffix_may_draft_less() -> None:
    draft = expander(factor=1.0).best(2, Match.own(tree_of(LATEST_ODD)), 3)
    assert draft.tokens == [2, 4, 7]
    assert draft.confidence == [1.0, 0.5, 0.5]


def test_the_tree_of_what_followed() -> None:
    r"""After 2: 3 thrice and 4 once; after 2 3: 5 twice and 0 once.

          2
        /   \
       3     4
      / \
     5   (0, as likely as 4, comes too late)
     |
     6
    """
    match = Match.own(tree_of(LATEST_ODD)).shortened()
    draft = expander(branches=2)._expand(2, match, match.below, 4)
    assert path_probs(draft) == {(): 1, (3,): 0.75, (3, 5): 0.5, (3, 5, 6): 0.5, (4,): 0.25}


def test_unlikely_paths_are_left_out() -> None:
    match = Match.own(tree_of(LATEST_ODD)).shortened()
    for branches in (1, 3):
        draft = expander(branches, min_prob=0.6)._expand(2, match, match.below, 9)
        assert draft.tokens == [2, 3]


def test_a_repetition_is_read_on_in_the_draft() -> None:
    draft = expander().best(7, Match.own(tree_of([5, 6, 7, 5, 6, 7])), 7)
    assert draft.tokens == [7, 5, 6, 7, 5, 6, 7, 5]


def test_beyond_max_depth_the_latest_occurrence_is_read() -> None:
    text = [*range(10), 20, 21, *range(10), 30, 31, *range(6)]
    draft = expander().best(5, Match.own(tree_of(text, max_depth=4)), 7)
    assert draft.tokens == [5, 6, 7, 8, 9, 30, 31, 0]


def test_nothing_is_drafted_across_outputs() -> None:
    """The tree of a corpus, where negative numbers end an output."""
    tree = tree_of([1, 2, 3, -4, 3, 4, 5, -8])
    for length, tail in ((2, []), (1, [4, 5])):
        start = tree.tokens.index(-4) - length if not tail else 4
        match = Match(tree, tree.deepest(tree.root, length, start), length, start)
        draft = expander()._expand(9, match, match.below, 5)
        assert draft.tokens == [9, *tail]


def test_many_children_are_not_all_looked_at() -> None:
    """The most frequent one is found even where it came last."""
    text = [token for other in range(100) for token in (1, 100 + other)]
    tree = tree_of([*text, *[1, 500] * 2, 1])
    match = Match.own(tree)
    while match.length > 1:
        match = match.shortened()
    draft = expander(branches=3, min_prob=0.001)._expand(1, match, match.below, 1)
    assert draft.tokens == [1, 500]
