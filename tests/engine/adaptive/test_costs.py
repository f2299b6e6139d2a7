"""Seconds of a round: of a measured table, by context length, learned, and the host's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.spec_stats import DraftShape
from specengine.engine.adaptive.costs import PLAIN, ContextCost, RunningCosts, StepCosts, bucket
from specengine.engine.adaptive.estimate import HostSeconds
from tests.support.adaptive import measured

TABLE = {1: {0: 1.0, 4: 1.8}, 8: {0: 2.0, 4: 4.4}}
DEVICE = {PLAIN: 1.0, DraftShape(1): 2.0, DraftShape(3): 3.0}


def test_a_table_is_interpolated_and_extrapolated() -> None:
    costs = StepCosts(TABLE)
    assert costs.of(1, 0) == 1.0
    assert costs.of(1, 2) == pytest.approx(1.4)
    assert costs.of(8, 5) == pytest.approx(5.0)
    assert costs.of(15, 0) == pytest.approx(3.0)
    assert costs.of(4, 2) == pytest.approx(1.4 * 4 / 7 + 3.2 * 3 / 7)


def test_no_extrapolated_cost_is_below_the_nearest_measurement() -> None:
    """A measurement that happened to be fast leads to no cost of 0 far out."""
    costs = StepCosts({2: {0: 1.0, 1: 0.9}, 4: {0: 0.8, 1: 0.8}})
    assert (costs.of(2, 50), costs.of(500, 0), costs.of(1, 0)) == (0.9, 0.8, 1.0)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 9), st.integers(0, 9))
def test_more_work_never_costs_less(size: int, other: int, steps: int, more: int) -> None:
    costs = measured(lambda b, k: 1.0 + b * (k + 1) / 64 + 0.1 * k)
    small, large = sorted((size, other))
    few, many = sorted((steps, more))
    low, high = costs.of(small, few), costs.of(large, many)
    assert low is not None
    assert high is not None
    assert low <= high * (1 + 1e-12)


def test_smaller_trees_cost_whole_ones_below_the_sizes_they_were_measured_at() -> None:
    costs = StepCosts({1: {0: 1.0, 4: 2.0}, 8: {0: 2.0, 4: 6.0}}, {5: {8: {4: 3.0}}})
    assert costs.of(8, 4, 5) == 3.0
    assert costs.of(8, 2, 5) == pytest.approx(2.5)
    assert costs.of(1, 4, 5) == 2.0
    assert costs.of(8, 4, 6) is None


def test_context_adds_to_the_cost_in_proportion_to_its_length() -> None:
    more = ContextCost(1000, {8: {0: 10.0, 4: 14.0}})
    costs = StepCosts(TABLE, {3: {8: {4: 3.0}}}, context_cost=more)
    bare = StepCosts(TABLE, {3: {8: {4: 3.0}}})
    assert costs.of(8, 4) == bare.of(8, 4)
    assert costs.set_context_length(600)
    assert costs.of(8, 4) == pytest.approx(4.4 + 8.4)
    assert costs.of(8, 2) == pytest.approx(3.2 + 7.2)
    assert costs.of(1, 0) == pytest.approx(1.0 + 6.0), "of the nearest batch size"
    assert costs.of(8, 4, 3) == pytest.approx((bare.of(8, 4, 3) or 0.0) + 8.4)


def test_small_changes_of_context_and_short_contexts_change_no_cost() -> None:
    costs = StepCosts(TABLE, context_cost=ContextCost(1000, {8: {0: 10.0, 4: 14.0}}))
    lengths = (20, 511, 512, 560, 2000, 2190, 2300, 500, 0)
    changes = [costs.set_context_length(tokens) for tokens in lengths]
    assert changes == [False, False, True, False, True, False, True, True, False]
    assert costs.of(8, 0) == 2.0
    assert not StepCosts(TABLE).set_context_length(5000), "without measurements"


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0, {1: {0: 1.0}}), (9, {}), (9, {1: {}}), (9, {1: {0: -1.0}})]
)
def test_a_context_cost_without_answers_is_refused(
    tokens: int, seconds: dict[int, dict[int, float]]
) -> None:
    with pytest.raises(ValueError, match="context cost"):
        ContextCost(tokens, seconds)


def test_rounds_teach_the_median_of_their_seconds() -> None:
    costs = RunningCosts()
    assert costs.of(1, 0) is None
    for seconds in (1.0, 50.0, 1.0):
        costs.record(1, 0, 0, seconds)
    assert costs.of(1, 3) is None, "drafts have not run"
    costs.record(1, 4, 4, 3.0)
    assert costs.of(1, 0) == 1.0
    assert costs.of(1, 2) == pytest.approx(2.0)
    assert costs.of(2, 0) is None, "another batch size"


def test_of_an_even_number_of_rounds_the_lower_median_counts() -> None:
    """A garbage collection in one of the first two rounds would count by half."""
    costs = RunningCosts()
    for seconds in (1.0, 50.0):
        costs.record(1, 0, 0, seconds)
    costs.record(1, 4, 4, 3.0)
    assert costs.of(1, 0) == 1.0


def test_a_round_costs_what_was_drafted_and_not_what_was_chosen() -> None:
    costs = RunningCosts()
    costs.record(8, 4, 0, 1.0)
    costs.record(8, 4, 16, 2.0)  # half of the requests drafted four levels
    assert costs.of(8, 2) == 2.0
    assert costs.of(7, 1) == pytest.approx(1.5)


def test_rounds_teach_the_cost_of_each_size_of_trees() -> None:
    costs = RunningCosts()
    costs.record(8, 4, 32, 6.0)
    costs.record(8, 4, 32, 3.0, 5)
    assert costs.of(8, 4, 5) is None, "plain decoding has not run"
    costs.record(8, 0, 0, 1.0)
    assert (costs.of(8, 4), costs.of(8, 4, 5), costs.of(8, 4, 8)) == (6.0, 3.0, None)
    assert costs.of(8, 2, 5) == pytest.approx(2.0)
    costs.record(8, 4, 0, 0.5, 5)  # no request had a draft
    assert costs.of(8, 0) == 0.5
    for _ in range(8):
        costs.record(8, 4, 32, 3.0, 5)
    assert costs.is_reliable(8, DraftShape(4, 5))
    assert not costs.is_reliable(8, DraftShape(4))


def test_an_old_cost_is_unreliable_and_replaced_by_the_next_measurement() -> None:
    costs = RunningCosts()
    for _ in range(20):
        costs.record(1, 0, 0, 1.0)
        costs.record(1, 2, 2, 2.0)
    assert costs.is_reliable(1, PLAIN)
    for _ in range(600):
        costs.record(1, 2, 2, 4.0)
    assert (costs.of(1, 2), costs.of(1, 0)) == (4.0, 1.0)
    assert not costs.is_reliable(1, PLAIN)
    costs.record(1, 0, 0, 2.0)
    assert costs.of(1, 0) == 2.0
    assert not costs.is_reliable(1, PLAIN)


def taught(rounds: int = 12) -> RunningCosts:
    costs = RunningCosts()
    for _ in range(rounds):
        costs.record(1, 0, 0, 1.0)
        costs.record(1, 4, 4, 3.0)
        costs.record(6, 4, 15, 7.0)  # of trees, cut and whole
        costs.record(6, 4, 15, 6.0, 5)
        costs.record(5, 0, 0, 2.0)
        costs.record(64, 4, 8, 9.0)
    return costs


def test_learned_costs_make_a_table_of_whole_depths() -> None:
    """As far as was drafted, and of batch sizes that have run with drafts and without."""
    costs = taught()
    table = costs.learned()
    assert table is not None
    assert table.seconds == {
        1: {0: 1.0, 1: 1.5, 2: 2.0, 3: 2.5, 4: 3.0},
        8: {0: 2.0, 1: pytest.approx(4.0), 2: pytest.approx(6.0), 3: pytest.approx(8.0)},
    }
    assert table.smaller_trees.keys() == {5}
    assert table.smaller_trees[5][8][3] == pytest.approx(costs.of(8, 3, 5))
    assert taught(2).learned() is None
    assert RunningCosts().learned() is None


def test_learning_starts_from_a_table_and_goes_on() -> None:
    table, costs = taught().learned(), RunningCosts()
    assert table is not None
    costs.start_from(table)
    for size, depth, nodes in [(1, 0, None), (1, 3, None), (7, 2, None), (7, 2, 5)]:
        assert costs.of(size, depth, nodes) == pytest.approx(taught().of(size, depth, nodes))
    assert (costs.is_given(1), costs.is_given(5), costs.is_given(2)) == (True, True, False)
    assert not costs.is_reliable(1, DraftShape(4))
    again = costs.learned()
    assert again is not None
    assert (again.seconds, again.smaller_trees) == (table.seconds, table.smaller_trees)
    for _ in range(9):
        costs.record(1, 4, 4, 5.0)
    assert costs.of(1, 4) == 5.0


def test_the_devices_costs_count_until_rounds_have_run() -> None:
    costs = RunningCosts(StepCosts({4: {0: 1.0, 2: 2.0}}))
    assert [costs.of(3, depth) for depth in range(3)] == [1.0, 1.5, 2.0]
    assert not costs.is_given(3)
    costs.record(3, 2, 6, 6.0)
    assert costs.of(3, 1) == 1.5, "no round without drafts has run"
    for _ in range(9):
        costs.record(3, 0, 0, 4.0)
    assert [costs.of(3, depth) for depth in range(3)] == [4.0, 5.0, 6.0]
    assert costs.of(16, 2) == 2.0
    table = costs.learned()
    assert table is not None
    assert table.seconds == {4: {0: 4.0, 1: 5.0, 2: 6.0}}, "the device's are not kept"


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(size) for size in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


def of(host: HostSeconds, batch_size: int = 4) -> list[float]:
    return list(host.of(batch_size, DEVICE).values())


def teach(host: HostSeconds, num_steps: int, seconds: float, batch_size: int = 4) -> list[bool]:
    return [host.record(batch_size, DraftShape(num_steps), seconds) for _ in range(8)]


def test_a_few_rounds_tell_nothing_of_the_host() -> None:
    host = HostSeconds()
    assert of(host) == [1.0, 2.0, 3.0]
    assert teach(host, 0, 9.0) == [False] * 7 + [True]
    assert of(host) == [9.0, 9.0, 9.0], "drafts cost no less than none"


def test_the_slower_of_host_and_device_determines_the_cost() -> None:
    host = HostSeconds()
    teach(host, 0, 0.5)
    teach(host, 1, 2.5)
    assert of(host) == [1.0, 2.5, 3.0]


def test_without_overlap_host_and_device_add_up() -> None:
    host = HostSeconds(overlaps=False)
    teach(host, 0, 0.5)
    assert of(host) == [1.5, 2.5, 3.5]
    teach(host, 3, 1.0)
    assert of(host) == [1.5, 3.0, 4.0]


def test_drafts_of_all_depths_cost_the_host_the_same() -> None:
    host = HostSeconds()
    for _ in range(4):
        host.record(4, DraftShape(1), 7.0)
        host.record(4, DraftShape(3, 8), 7.0)
    assert of(host) == [1.0, 7.0, 7.0]


def test_a_slower_host_scales_the_other_kind_until_that_is_measured() -> None:
    host = HostSeconds()
    teach(host, 0, 2.0)
    teach(host, 1, 4.0)
    host.record(4, PLAIN, 2.0)
    teach(host, 3, 10.0)
    assert of(host) == [5.0, 10.0, 10.0]
    assert not any(teach(host, 0, 5.0)), "older samples are gone"
    teach(host, 0, 2.0)
    assert of(host) == [2.0, 4.0, 4.0]


def test_the_first_measurement_of_a_scaled_kind_does_not_scale_back() -> None:
    """Drafts were measured first while other load was on the host's cores."""
    host = HostSeconds()
    for num_steps, seconds in ((0, 2.0), (1, 8.0), (1, 2.2), (0, 2.0)):
        teach(host, num_steps, seconds)
    assert of(host) == [2.0, 2.2, 3.0]
    teach(host, 1, 8.8)
    assert of(host) == [8.0, 8.8, 8.8], "from then on they are in proportion"


def test_the_hosts_seconds_are_kept_by_bucket_of_batch_sizes() -> None:
    host = HostSeconds()
    teach(host, 0, 7.0, batch_size=3)
    assert of(host, 4)[0] == 7.0
    assert of(host, 5)[0] == of(host, 2)[0] == 1.0


def test_a_few_slow_rounds_do_not_count_for_the_host() -> None:
    host = HostSeconds()
    for seconds in (2.0, 2.0, 900.0, 2.0, 2.0, 900.0, 2.0, 2.0):
        host.record(4, PLAIN, seconds)
    assert of(host)[0] == 2.0


def test_a_small_change_of_the_host_is_ignored() -> None:
    host = HostSeconds()
    changes = [teach(host, 0, seconds)[-1] for seconds in (2.0, 2.05, 2.2, 2.2)]
    assert changes == [True, False, True, False]
    assert of(host)[0] == 2.2
