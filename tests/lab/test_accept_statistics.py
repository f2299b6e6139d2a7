"""From rounds to numbers, against sums by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.lab.accept.rounds import RoundTable, build_table
from specengine.lab.accept.statistics import (
    bucket_label,
    calibration,
    decisions_by_entropy,
    endings,
    group,
    groups_by_value,
    histogram,
    outside_share,
    positions,
)
from specengine.lab.accept.summary import PromptLabels, summarise
from tests.lab.rounds_by_hand import Round, sample, table


@pytest.fixture
def two_requests() -> RoundTable:
    """Request 0 starts with one token from its prefill and ends with 7: rounds of 3, 1, then 2 of
    the 4 tokens decided, for its answer ended there. Request 1 ends with 4: rounds of 2 and 1."""
    return table(
        [
            Round(0, 1, [11, 12, 13], 3, goes_on=True, context=100, entropy=[0.1, 0.3, 3.0]),
            Round(1, 1, [21, 22], 1, goes_on=False, context=140, entropy=[0.1, 0.1]),
        ],
        [
            Round(0, 4, [14], 3, goes_on=True, context=103, entropy=[3.0]),
            Round(1, 3, [23], 0, goes_on=False, context=142, entropy=[0.1]),
        ],
        [Round(0, 5, [15, 16, 17, 18], 3, goes_on=False, context=104, entropy=[0.1] * 4)],
        final=[7, 4],
    )


def test_what_a_round_emits_is_what_reaches_the_answer(two_requests: RoundTable) -> None:
    one = two_requests
    assert one.emitted.tolist() == [3, 2, 1, 1, 2]
    assert one.stood.tolist() == [2, 1, 0, 0, 2]
    assert one.tried.tolist() == [3, 1, 1, 0, 2]
    assert one.is_cut.tolist() == [False, False, False, False, True]
    assert one.tokens[1].tolist() == [21, 22, -1, -1]


def test_rounds_may_come_in_any_order_of_requests() -> None:
    one = table(
        [Round(1, 5, [1], 0, False), Round(0, 1, [1, 2], 1, False)],
        [Round(0, 3, [1], 0, False)],
        final=[4, 6],
    )
    assert one.emitted.tolist() == [1, 2, 1]


def test_no_rounds_at_all() -> None:
    one = build_table([], np.array([1]))
    assert len(one) == 0
    found = group(sample(one, [0], 1), np.ones(0, dtype=bool), "all")
    assert np.isnan(found.tau.value)
    assert histogram(one) == (0,)


def test_tau_and_groups(two_requests: RoundTable) -> None:
    one = sample(two_requests, [0, 1], 2)
    every = group(one, np.ones(5, dtype=bool), "all")
    assert (every.prompts, every.rounds, every.tokens) == (2, 5, 9)
    assert every.tau.value == pytest.approx(9 / 5)
    # drawings: both prompts; the first one twice
    assert (every.tau.low, every.tau.high) == pytest.approx((9 / 5 + 0.005, 2 - 0.005))
    # tried in rounds 0, 1, 2 and 4; stood in 0, 1 and 4
    assert every.first.value == pytest.approx(3 / 4)
    by_context = groups_by_value(one, two_requests.context, (0, 128, 256))
    assert [found.label for found in by_context] == ["0 to 128", "128 to 256"]
    assert [found.tau.value for found in by_context] == pytest.approx([6 / 3, 3 / 2])


def test_positions(two_requests: RoundTable) -> None:
    found = positions(sample(two_requests, [0, 1], 2), known=None)
    assert [one.position for one in found] == [1, 2, 3]
    assert [one.joint.value for one in found] == pytest.approx([3 / 5, 2 / 5, 0])
    # tried: rounds 0, 1, 2, 4; rounds 0 and 4; round 0
    assert [one.conditional.value for one in found] == pytest.approx([3 / 4, 1, 0])
    assert [one.conditional.count for one in found] == [4, 2, 1]


def test_misses_are_told_from_wrong_tokens(two_requests: RoundTable) -> None:
    known = np.ones(30, dtype=bool)
    known[[13, 22, 11]] = False  # 22 is a bonus below which nothing was drafted, 11 stood
    found = positions(sample(two_requests, [0, 1], 2), known)
    assert [one.misses for one in found] == [0, 0, 1]
    why = endings(two_requests, known)
    assert why.outside_vocabulary == 1  # round 0
    assert why.rejected == 1  # round 2
    assert why.draft_used_up == 1  # round 1
    assert why.nothing_drafted == 1  # round 3
    assert why.answer_ended == 1  # round 4
    assert outside_share(two_requests, known) == pytest.approx(3 / 9)
    assert outside_share(two_requests, None) is None


def test_histogram(two_requests: RoundTable) -> None:
    assert histogram(two_requests) == (2, 2, 1)


def test_decisions_by_entropy(two_requests: RoundTable) -> None:
    found = {one.label: one for one in decisions_by_entropy(sample(two_requests, [0, 1], 2))}
    # round 0: 0.1 and 0.3 stood, 3.0 fell; round 1: 0.1 stood; round 2: 3.0 fell; round 4: two
    assert {label: (one.rate.value, one.rate.count) for label, one in found.items()} == {
        "0.05 to 0.25": (1.0, 4),
        "0.25 to 0.5": (1.0, 1),
        "2 to 4": (0.0, 2),
    }


def test_calibration_error() -> None:
    nodes = [(0.9, True), (0.95, True), (0.92, False), (0.15, False), (1.0, True)]
    one = table(
        [Round(0, 1, [1, 2], 5, goes_on=False, nodes=nodes), Round(1, 1, [1, 2], 1, False)],
        [Round(1, 3, [1, 2, 3], 2, False, nodes=[(0.5, True)])],  # cut: not counted
        final=[3, 4],
    )
    found = calibration(sample(one, [0, 1], 2))
    assert found is not None
    assert found.nodes == 5
    assert [bin.label for bin in found.bins] == ["0.1 to 0.2", "0.9 to 1"]
    assert [bin.rate.value for bin in found.bins] == pytest.approx([0.0, 3 / 4])
    high = (0.9 + 0.95 + 0.92 + 1.0) / 4
    assert found.ece == pytest.approx(1 / 5 * 0.15 + 4 / 5 * (high - 3 / 4), abs=1e-6)


def test_no_confidence_no_calibration(two_requests: RoundTable) -> None:
    assert calibration(sample(two_requests, [0, 1], 2)) is None


def test_a_summary_takes_the_rounds_apart(two_requests: RoundTable) -> None:
    labels = PromptLabels(np.array([0, 1]), np.array([1, 0]), ["a", "b"], ["b/x", "a"])
    turns = np.array([0, 1])[two_requests.request]
    found = summarise(sample(two_requests, [0, 1], 2), turns, labels, None)
    assert [one.label for one in found.by_set] == ["a", "b"]
    assert [one.tau.value for one in found.by_set] == pytest.approx([6 / 3, 3 / 2])
    assert [one.label for one in found.by_category] == ["b/x", "a"]
    assert [one.label for one in found.by_turn] == ["turn 1", "turn 2"]
    assert found.drafted_per_round == pytest.approx(10 / 5)
    assert found.calibration is None


def test_labels_of_buckets() -> None:
    assert bucket_label((0, 128), 0) == "0 to 128"
    assert bucket_label((0.0, 0.05, 4.0), 2) == "4 up"


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=6),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 4),
)
def test_what_adds_up(requests: list[list[tuple[int, int]]], missing: int) -> None:
    """Each request's rounds, as (tokens decided, nodes drafted beyond those that stood); of its
    last round, up to `missing` tokens are cut."""
    rounds, final = [], []
    for request, sizes in enumerate(requests):
        start = 1
        for length, more in sizes:
            drafted = length - 1 + more
            rounds.append(Round(request, start, list(range(length)), drafted, more > 0))
            start += length
        final.append(start - min(missing, sizes[-1][0] - 1))
    one = table(rounds, final=final)
    assert one.emitted.sum() == sum(final) - len(final)
    assert ((one.tried == one.stood) | (one.tried == one.stood + 1)).all()
    assert (one.emitted == one.stood + ~one.is_cut).all()
    why = endings(one, None)
    total = why.rejected + why.draft_used_up + why.nothing_drafted + why.answer_ended
    assert total == len(one) == sum(histogram(one))
    found = positions(sample(one, range(len(final)), len(final)), None)
    joint = sum(each.joint.value for each in found)
    assert joint == pytest.approx(one.stood.mean())
    chained = np.cumprod([each.conditional.value for each in found])
    for each, product in zip(found, chained, strict=True):
        # Fewer rounds try a position than came to it: the joint share is at most the product.
        assert each.joint.value <= product + 1e-9
