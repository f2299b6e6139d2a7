"""The index against a brute-force reading of the text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(max_examples=300, deadline=None)
@given(st.lists(TOKENS, max_size=60), st.integers(1, 3), st.integers(0, 4), st.data())
def test_lookup_is_longest_then_latest(
    text: list[int], low: int, more: int, data: st.DataObject
) -> None:
    high = low + more
    index = NgramIndex(low, high)
    done = 0
    while done < len(text):
        step = data.draw(st.integers(1, 20))
        index.extend(text[done : done + step])
        done += step
    assert index.tokens == text
    assert list(index.lookup(text[-high:])) == matches(text, text, low, high)


@settings(max_examples=200, deadline=None)
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
