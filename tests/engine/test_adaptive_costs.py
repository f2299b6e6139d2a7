"""What rounds cost: tables that are measured or read, and medians of the rounds themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.errors import ConfigError
from specengine.engine.adaptive.costs import ContextCost, RunningCosts, StepCosts, bucket, measure

TABLE = {1: {0: 1.0, 4: 1.8}, 8: {0: 2.0, 4: 4.4}}


def test_lines_between_measurements_and_beyond() -> None:
    costs = StepCosts(TABLE)
    assert costs.of(1, 0) == 1.0
    assert costs.of(1, 2) == pytest.approx(1.4)
    assert costs.of(8, 5) == pytest.approx(5.0)
    assert costs.of(15, 0) == pytest.approx(3.0)
    middle = (costs.of(1, 2) + costs.of(8, 2)) / 2
    assert costs.of(4, 2) == pytest.approx(costs.of(1, 2) * 4 / 7 + costs.of(8, 2) * 3 / 7)
    assert costs.of(4, 2) < middle


def test_nothing_is_cheaper_than_what_was_measured_nearest() -> None:
    """A measurement that happened to be fast leads to no cost of 0 far out."""
    costs = StepCosts({2: {0: 1.0, 1: 0.9}, 4: {0: 0.8, 1: 0.8}})
    assert costs.of(2, 50) == 0.9
    assert costs.of(500, 0) == 0.8
    assert costs.of(1, 0) == 1.0


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 9), st.integers(0, 9))
def test_more_work_never_costs_less(size: int, other: int, steps: int, more: int) -> None:
    costs = measure(lambda b, k: 1.0 + b * (k + 1) / 64 + 0.1 * k, [1, 7, 64], [0, 1, 4])
    small, large = sorted((size, other))
    few, many = sorted((steps, more))
    assert costs.of(small, few) <= costs.of(large, many) * (1 + 1e-12)


def test_measured_from_large_to_small() -> None:
    asked: list[tuple[int, int]] = []

    def time_of(batch_size: int, num_steps: int) -> float:
        asked.append((batch_size, num_steps))
        return 1.0 + num_steps

    costs = measure(time_of, [1, 8, 8], [2, 0])
    assert asked == [(8, 0), (8, 2), (1, 0), (1, 2)]
    assert costs.of(4, 1) == 2.0


def test_text_that_is_read_takes_its_time() -> None:
    costs = StepCosts(TABLE, {3: {8: {4: 3.0}}}, reading=ContextCost(1000, {8: {0: 10.0, 4: 14.0}}))
    bare = StepCosts(TABLE, {3: {8: {4: 3.0}}})
    assert costs.of(8, 4) == bare.of(8, 4)
    assert costs.go_to(600)
    assert costs.of(8, 4) == pytest.approx(4.4 + 8.4)
    assert costs.of(8, 2) == pytest.approx(3.2 + 7.2)
    assert costs.of(1, 0) == pytest.approx(1.0 + 6.0), "of what was measured nearest"
    smaller = bare.of(8, 4, 3)
    assert smaller is not None
    assert costs.of(8, 4, 3) == pytest.approx(smaller + 8.4)


def test_texts_that_are_hardly_longer_cost_the_same() -> None:
    costs = StepCosts(TABLE, reading=ContextCost(1000, {8: {0: 10.0, 4: 14.0}}))
    steps = [costs.go_to(tokens) for tokens in (20, 511, 512, 560, 2000, 2190, 2300, 500, 0)]
    assert steps == [False, False, True, False, True, False, True, True, False]
    assert costs.of(8, 0) == 2.0, "short ones cost nothing more"
    assert not StepCosts(TABLE).go_to(5000), "nobody knows what they cost"


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0, {1: {0: 1.0}}), (9, {}), (9, {1: {}}), (9, {1: {0: -1.0}})]
)
def test_what_reading_cannot_take(tokens: int, seconds: dict[int, dict[int, float]]) -> None:
    with pytest.raises(ValueError, match="reading"):
        ContextCost(tokens, seconds)


def test_a_file_keeps_what_reading_takes(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    reading = ContextCost(2048, {1: {0: 0.5, 4: 0.6}})
    StepCosts(TABLE, reading=reading).write(path)
    found = StepCosts.read(path)
    assert found.reading == reading
    assert "reading" not in found.notes
    path.write_text('{"seconds": {"1": {"0": 1, "3": 2}}, "reading": {"tokens": 9}}')
    with pytest.raises(ConfigError, match="seconds"):
        StepCosts.read(path)


def test_a_file_keeps_a_table(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    StepCosts(TABLE, notes={"device": "a card", "model": "a model"}).write(path)
    found = StepCosts.read(path)
    assert (found.seconds, found.notes) == (TABLE, {"device": "a card", "model": "a model"})


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    path, link = tmp_path / "costs.json", tmp_path / "link.json"
    link.symlink_to(path)
    StepCosts(TABLE).write(link)
    assert link.is_symlink()
    assert StepCosts.read(path).seconds == TABLE


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_a_write_that_is_broken_off_leaves_what_was_there(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.json"
    StepCosts(TABLE).write(path)
    before = path.read_bytes()

    def half_a_text(half: Path, text: str, encoding: str) -> None:
        half.write_bytes(text.encode(encoding)[: len(text) // 2])
        raise error

    def no_replace(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        if step == "write_text":
            patch.setattr(Path, "write_text", half_a_text)
        else:
            patch.setattr("os.replace", no_replace)
        with pytest.raises(type(error)):
            StepCosts({1: {0: 9.0, 4: 9.0}}).write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "list indices"),
        ("{}", "'seconds'"),
        ('{"seconds": {}}', "batch sizes of at least 1"),
        ('{"seconds": {"0": {"0": 1, "1": 2}}}', "batch sizes of at least 1"),
        ('{"seconds": {"one": {"0": 1, "1": 2}}}', "invalid literal"),
        ('{"seconds": {"1": {"1": 1, "2": 2}}}', "batch size 1 needs num_steps 0"),
        ('{"seconds": {"1": {"0": 1}}}', "batch size 1 needs num_steps 0 and at least one more"),
        ('{"seconds": {"1": {"0": 1, "-1": 2}}}', "batch size 1 needs num_steps 0"),
        ('{"seconds": {"1": {"0": 1, "1": 0}}}', "batch size 1: seconds must be above 0"),
        ('{"seconds": {"1": {"0": 1, "1": NaN}}}', "seconds must be above 0"),
        ('{"seconds": {"1": 3}}', "has no attribute 'items'"),
    ],
)
def test_what_is_no_table_is_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="it looks like") as refusal:
        StepCosts.read(path)
    assert why in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        StepCosts.read(tmp_path / "none.json")


def test_rounds_teach_their_cost() -> None:
    costs = RunningCosts()
    assert costs.of(1, 0) is None
    for seconds in (1.0, 50.0, 1.0):
        costs.record(1, 0, 0, seconds)
    assert costs.of(1, 3) is None, "drafts have not run"
    costs.record(1, 4, 4, 3.0)
    assert costs.of(1, 0) == 1.0
    assert costs.of(1, 2) == pytest.approx(2.0)
    assert costs.of(2, 0) is None, "another batch size"


def test_a_round_costs_what_was_drafted_in_it() -> None:
    """Not what might have been: half of eight requests drafted four tokens each."""
    costs = RunningCosts()
    costs.record(8, 4, 0, 1.0)
    costs.record(8, 4, 16, 2.0)
    assert costs.of(8, 2) == 2.0
    assert costs.of(7, 1) == pytest.approx(1.5)


def test_old_measurements_are_forgotten_when_there_are_new_ones() -> None:
    costs = RunningCosts()
    for _ in range(20):
        costs.record(1, 0, 0, 1.0)
        costs.record(1, 2, 2, 2.0)
    assert costs.is_settled(1, 0)
    for _ in range(600):
        costs.record(1, 2, 2, 4.0)
    assert costs.of(1, 2) == 4.0
    assert costs.of(1, 0) == 1.0
    assert not costs.is_settled(1, 0)
    costs.record(1, 0, 0, 2.0)
    assert costs.of(1, 0) == 2.0
    assert not costs.is_settled(1, 0)


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


def test_what_was_learned_makes_a_table() -> None:
    """At whole depths, as far as was drafted; nothing of sizes that say too little."""
    costs = taught()
    table = costs.table()
    assert table is not None
    assert table.seconds == {
        1: {0: 1.0, 1: 1.5, 2: 2.0, 3: 2.5, 4: 3.0},
        8: {0: 2.0, 1: pytest.approx(4.0), 2: pytest.approx(6.0), 3: pytest.approx(8.0)},
    }
    assert table.smaller_trees.keys() == {5}
    assert table.smaller_trees[5][8][3] == pytest.approx(costs.of(8, 3, 5))
    assert taught(2).table() is None
    assert RunningCosts().table() is None


def test_a_table_is_where_learning_starts() -> None:
    table = taught().table()
    assert table is not None
    costs = RunningCosts()
    costs.start_from(table)
    for size, depth, nodes in [(1, 0, None), (1, 3, None), (7, 2, None), (7, 2, 5)]:
        assert costs.of(size, depth, nodes) == pytest.approx(taught().of(size, depth, nodes))
    assert (costs.is_given(1), costs.is_given(5), costs.is_given(2)) == (True, True, False)
    assert not costs.is_settled(1, 4)
    again = costs.table()
    assert again is not None
    assert (again.seconds, again.smaller_trees) == (table.seconds, table.smaller_trees)
    for _ in range(9):
        costs.record(1, 4, 4, 5.0)
    assert costs.of(1, 4) == 5.0, "rounds go on teaching"


def test_what_the_device_takes_is_known_until_rounds_have_run() -> None:
    costs = RunningCosts(StepCosts({4: {0: 1.0, 2: 2.0}}))
    assert (costs.of(3, 0), costs.of(3, 1), costs.of(3, 2)) == (1.0, 1.5, 2.0)
    assert not costs.is_given(3)
    costs.record(3, 2, 6, 6.0)
    assert costs.of(3, 1) == 1.5, "nothing ran without drafts"
    costs.record(3, 0, 0, 4.0)
    assert (costs.of(3, 0), costs.of(3, 1), costs.of(3, 2)) == (4.0, 5.0, 6.0)
    assert costs.of(16, 2) == 2.0
    for _ in range(8):
        costs.record(3, 0, 0, 4.0)
    table = costs.table()
    assert table is not None
    assert table.seconds == {4: {0: 4.0, 1: 5.0, 2: 6.0}}, "what no round has taught is not kept"


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(size) for size in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
