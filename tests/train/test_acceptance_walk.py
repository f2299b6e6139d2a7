"""Walking through answers in rounds, as the engine would."""

from __future__ import annotations

import numpy as np
import pytest

from specengine.draft.train.acceptance import Judged, WalkCounts, accepted_length, walk

STEPS = 3


def judged(
    length: int,
    answers: range,
    wrong: set[tuple[int, int]] | None = None,
    missed: set[tuple[int, int]] | None = None,
    sampled: set[int] | None = None,
) -> Judged:
    """One document whose drafts are right but for `wrong`, pairs of step and row. sampled: rows
    after which the target would not have said what stands there."""
    matches = np.ones((STEPS, length), dtype=bool)
    outside = np.zeros((STEPS, length), dtype=bool)
    for place in wrong or set():
        matches[place] = False
    for place in missed or set():
        matches[place], outside[place] = False, True
    greedy = np.array([row not in (sampled or set()) for row in range(length)])
    said = np.array([place in answers for place in range(length)])
    return Judged(matches, outside, greedy, said, [length])


def counts(found: WalkCounts) -> tuple[list[int], list[int], list[int]]:
    return found.drafted.tolist(), found.accepted.tolist(), found.missed.tolist()


def test_rounds_of_right_drafts() -> None:
    """Tokens 4 .. 15 are the answer; roots stand at 4, 8 and 12: three drafts and the bonus."""
    found = walk(judged(16, range(4, 16)), STEPS)
    assert counts(found) == ([3, 3, 3], [3, 3, 3], [0, 0, 0])


def test_a_wrong_draft_ends_the_round_and_the_bonus_is_the_next_root() -> None:
    """The round from root 4 (row 3) fails at its second token: 5 stands, 6 is the bonus."""
    found = walk(judged(11, range(4, 11), wrong={(1, 3)}), STEPS)
    # roots 4 (1 of 2), 6 (3 of 3), 10 is the last token
    assert counts(found) == ([2, 2, 1], [2, 1, 1], [0, 0, 0])


def test_misses_are_counted_apart() -> None:
    found = walk(judged(8, range(4, 8), missed={(0, 3)}, wrong={(0, 4)}), STEPS)
    # root 4: missed at once; root 5: wrong at once; root 6: token 7 stands
    assert counts(found) == ([3, 0, 0], [1, 0, 0], [1, 0, 0])


def test_a_sampled_token_ends_a_round_without_a_verdict() -> None:
    """Token 5 stands where the target would have said another, which the draft did."""
    found = walk(judged(10, range(4, 10), sampled={4}), STEPS)
    # root 4: one accepted, the text goes on otherwise; root 5: three; root 9 is the last
    assert counts(found) == ([2, 1, 1], [2, 1, 1], [0, 0, 0])


def test_answers_and_documents_are_walked_one_by_one() -> None:
    one = judged(6, range(2, 6))
    said = np.array([False, True, True, False, True, True] + [True] * 3)
    two = Judged(np.ones((STEPS, 9), bool), np.zeros((STEPS, 9), bool), np.ones(9, bool), said, [])
    found = walk(Judged(two.matches, two.missed, two.greedy, said, [6, 3]), STEPS)
    # answers [1, 2] and [4, 5]: a token after each root; the second document: 0 is no root
    assert counts(found) == ([3, 0, 0], [3, 0, 0], [0, 0, 0])
    assert counts(walk(one, STEPS)) == ([1, 1, 1], [1, 1, 1], [0, 0, 0])


def test_accepted_length_multiplies_what_is_conditional() -> None:
    assert accepted_length([0.5, 0.5]) == pytest.approx(1 + 0.5 + 0.25)
    assert accepted_length([]) == 1.0
