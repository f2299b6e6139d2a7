"""Duplicates, forbidden texts, loops, and the order of what comes in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.lab.generate.filters import Dropped, check_words, loop_start, trim_loop
from specengine.lab.generate.in_order import InOrder
from specengine.lab.generate.words import ForbiddenTexts, SeenTexts, words_of

STORY = (
    "Once upon a time there was a miller who had three sons and a cat, and when he died the "
    "eldest took the mill, the second took the donkey, and the youngest had nothing but the cat"
)


def test_words() -> None:
    assert words_of("What's 3.5 + Äpfel?\n") == ["what", "s", "3", "5", "äpfel"]


def test_duplicates_are_found_whatever_their_spelling() -> None:
    seen = SeenTexts()
    assert seen.add(words_of("How are you today?"))
    assert not seen.add(words_of("how are you, today"))
    assert seen.add(words_of("How are you tonight?"))


def test_near_duplicates_are_found() -> None:
    seen = SeenTexts()
    assert seen.add(words_of(STORY))
    assert not seen.add(words_of(STORY + " and a coat"))
    assert not seen.add(words_of("Tell me: " + STORY))
    scrambled = words_of(STORY)
    random.Random(0).shuffle(scrambled)
    assert seen.add(scrambled)


def test_what_was_seen_can_be_kept() -> None:
    first, second = SeenTexts(), SeenTexts()
    keys = first.add(words_of(STORY))
    second.load(keys)
    assert not second.add(words_of(STORY))
    assert all(0 <= key < 2**64 for key in keys)


def test_forbidden_texts() -> None:
    forbidden = ForbiddenTexts([STORY, "Why so sad?"], size=8)
    assert forbidden.occurs_in(words_of("there was a miller who had three sons"))
    assert not forbidden.occurs_in(words_of("there was a miller who had four sons"))
    assert forbidden.occurs_in(words_of("Tell me, why so sad, Tom"))
    assert not forbidden.occurs_in(words_of("Tell me, why so sadly"))
    assert not forbidden.occurs_in([])


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 12), st.integers(0, 11))
def test_loops_are_found_where_they_begin(start: list[int], period: int, part: int) -> None:
    cycle = [100 + i for i in range(period)]
    tokens = start + cycle * 30 + cycle[: min(part, period - 1)]
    assert loop_start(tokens) == len(start)
    trimmed = trim_loop(tokens)
    assert trimmed == tokens[: len(trimmed)]
    assert len(trimmed) - len(start) == max(3 * period, 24)


def test_what_is_no_loop_stays() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(1000) for _ in range(300)]
    assert loop_start(tokens) is None
    assert trim_loop(tokens) is tokens
    assert trim_loop([5] * 10) == [5] * 10, "too short to be called endless"
    assert trim_loop([]) == []


def test_turns_of_words() -> None:
    check_words(words_of(STORY), 3)
    with pytest.raises(Dropped, match="short"):
        check_words(["a", "b"], 3)
    with pytest.raises(Dropped, match="repetitive"):
        check_words(["a", "b", "c"] * 20, 3)


@given(st.permutations(range(8)))
def test_in_order(numbers: list[int]) -> None:
    queue: InOrder[str] = InOrder(5)
    due: list[str] = []
    for count, number in enumerate(numbers, start=1):
        due += list(queue.put(5 + number, str(number)))
        assert due == [str(n) for n in range(len(due))], "nothing comes too early"
        assert queue.next == 5 + len(due)
        assert len(due) == 8 or count < 8
    assert due == [str(n) for n in range(8)]
