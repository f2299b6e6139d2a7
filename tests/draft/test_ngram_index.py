"""The index against a brute-force reading of the text."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.draft.ngram import index as ngram_index
from specengine.draft.ngram.index import NgramIndex

TOKENS = st.integers(0, 2)


def matches(text: list[int], tail: list[int], low: int, high: int) -> list[int]:
    """Ends of contexts with a token after them, by shared length, then recency."""
    found = []
    for end in range(len(text) - 1):
        shared = 0
        while (
            shared < min(high, len(tail), end + 1)
            and text[end - shared] == tail[len(tail) - 1 - shared]
        ):
            shared += 1
        if shared >= low:
            found.append((-shared, -end))
    return [-end for _, end in sorted(found)]


@pytest.mark.parametrize("most_whole", [3, 256])
@settings(max_examples=300)
@given(
    st.lists(st.lists(TOKENS, max_size=20), max_size=5),
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from([0, 1000]),
    st.data(),
)
def test_lookup_is_longest_then_latest(
    most_whole: int, parts: list[list[int]], low: int, more: int, first: int, data: st.DataObject
) -> None:
    """However the text was extended, and whenever it was looked at. first: the smallest token;
    small ints are one object each."""
    high, text = low + more, list[int]()
    index = NgramIndex(low, high)
    with patch.object(ngram_index, "_MOST_WHOLE", most_whole):
        for part in parts:
            new = [first + token for token in part]
            text += new
            index.extend(new)
            assert index.tokens == text
            if data.draw(st.booleans()):
                assert list(index.lookup(text[-high:])) == matches(text, text, low, high)
            if data.draw(st.booleans()):
                tail = [first + token for token in data.draw(st.lists(TOKENS, max_size=8))]
                assert list(index.lookup(tail[-high:])) == matches(text, tail, low, high)
            next(index.lookup(text[-high:]), None)  # as chains do


def test_no_lookup_splits_many_ends_at_once() -> None:
    """Text that says one thing over and over has frequent contexts of every length."""
    index = NgramIndex(2, 12)
    index.extend([1] * 5000)
    node = index._contexts[1, 1]
    waiting = []
    for _ in range(10):
        assert isinstance(node, ngram_index._Node)
        waiting.append(len(node.ends) - node.num_split)
        node = node.children[1]
    assert max(waiting) < 256
    assert next(index.lookup([2] + [1] * 11)) == 4998


@settings(max_examples=200)
@given(st.lists(TOKENS, max_size=60), st.lists(TOKENS, max_size=6))
def test_lookup_of_a_foreign_tail(text: list[int], tail: list[int]) -> None:
    index = NgramIndex(2, 4)
    index.extend(text)
    assert list(index.lookup(tail[-4:])) == matches(text, tail, 2, 4)


def test_a_repeated_context_is_found_at_its_latest_place_first() -> None:
    index = NgramIndex(2, 8)
    index.extend([7, 1, 2, 3, 8, 1, 2, 4, 9, 7, 1, 2])
    assert list(index.lookup([9, 7, 1, 2])) == [2, 6]
    assert list(index.lookup([5, 1, 2])) == [6, 2]
    assert list(index.lookup([2])) == []
