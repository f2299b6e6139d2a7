"""A file of round costs: made by one engine, read by the next, and refused by any other."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from specengine.core.config import SpecConfig
from specengine.core.errors import ConfigError
from specengine.engine.adaptive.cost_file import CostFile, read_table, write_table
from specengine.engine.adaptive.costs import ContextCost, RunningCosts, StepCosts

TABLE = {1: {0: 0.1, 4: 1 / 3}, 8: {0: 2.0, 4: 4.4}}
FACTS = {"model": "a model", "dtype": "float32", "depths": [0, 4], "trees": {4: [2]}}


def named(path: Path, **more: Any) -> CostFile | None:
    return CostFile.of(SpecConfig(algorithm="NGRAM", cost_table=str(path), **more))


def file_of(path: Path, **more: object) -> CostFile:
    found = named(path)
    assert found is not None
    found.add_facts({**FACTS, **more})
    return found


def refuse() -> StepCosts:
    raise AssertionError("measured")


def test_measured_once_and_read_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "costs.json"
    first = file_of(path).read_or(lambda: StepCosts(TABLE, {2: {8: {4: 3.0}}}))
    with caplog.at_level(logging.INFO):
        second = file_of(path).read_or(refuse)
    assert (second.seconds, second.smaller_trees) == (first.seconds, first.smaller_trees)
    assert "saves 0.0 s of measuring" in caplog.text
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text())["measured_for"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"model": "another"}, "model was 'a model' and is 'another'"),
        ({"depths": [0, 3]}, r"depths was \[0, 4\] and is \[0, 3\]"),
        ({"trees": {}}, r"trees was \{'4': \[2\]\} and is \{\}"),
        ({"page_size": 16}, "page_size was None and is 16"),
    ],
)
def test_a_table_measured_for_something_else_is_refused(
    other: dict[str, object], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    file_of(path).read_or(lambda: StepCosts(TABLE))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"costs\.json was .*: {told}; delete the file"):
        file_of(path, **other)
    assert path.read_bytes() == before


def test_a_missing_fact_is_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    file_of(path, quantization="int8").read_or(lambda: StepCosts(TABLE))
    with pytest.raises(ConfigError, match="quantization was 'int8' and is None"):
        file_of(path)


def test_a_table_written_by_hand_holds_for_all_engines(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"seconds": {"1": {"0": 1, "4": 2}}, "by": "me"}')
    found, costs = file_of(path), RunningCosts()
    assert found.by_hand is not None
    assert found.by_hand.seconds == found.read_or(refuse).seconds == {1: {0: 1.0, 4: 2.0}}
    assert found.read_or(refuse).notes == {"by": "me"}
    own = tmp_path / "own.json"
    file_of(own).read_or(lambda: StepCosts(TABLE))
    assert file_of(own).by_hand is None
    file_of(own).start(costs)
    assert costs.of(1, 4) == 1 / 3


@pytest.mark.parametrize("where", ["none/costs.json", "file/costs.json", "/proc/self/costs.json"])
def test_a_path_where_no_file_can_be_made_is_refused(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--speculative-cost-table .*name one in a folder"):
        named(tmp_path / where)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no table of round costs"):
        named(tmp_path)


def test_checking_a_path_leaves_no_file(tmp_path: Path) -> None:
    assert named(tmp_path / "costs.json") is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fixed", [{"algorithm": None}, {"adaptive": False}], ids=str)
def test_no_file_is_read_where_depth_is_fixed(fixed: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"algorithm": "NGRAM", "cost_table": str(tmp_path / "a" / "b")}
    assert CostFile.of(SpecConfig(**{**given, **fixed})) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"seconds": {"1": {"0": 1', "delete it to have one made"),
        ('{"measured_for": {}, "seconds": {}}', "batch sizes of at least 1"),
        ('{"measured_for": 3, "seconds": {"1": {"0": 1, "1": 2}}}', "is no JSON object"),
        ('{"measured_for": null, "seconds": {"1": {"0": 1, "1": 2}}}', "is no JSON object"),
    ],
)
def test_a_damaged_file_is_refused_and_kept(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as refusal:
        named(path)
    assert str(path) in str(refusal.value)
    assert path.read_text() == text


def test_a_table_that_cannot_be_written_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder went away while costs were measured."""
    folder = tmp_path / "folder"
    folder.mkdir()
    found = file_of(folder / "costs.json")
    folder.rmdir()
    assert found.read_or(lambda: StepCosts(TABLE)).seconds == TABLE
    assert "round costs are not kept" in caplog.text


def test_too_few_rounds_replace_no_table(tmp_path: Path) -> None:
    path, costs = tmp_path / "costs.json", RunningCosts()
    file_of(path).keep_learned(costs)
    assert not path.exists()
    file_of(path).read_or(lambda: StepCosts(TABLE))
    file_of(path).start(costs)
    file_of(path).keep_learned(costs)
    kept = read_table(path).seconds
    assert {size: (curve[0], curve[4]) for size, curve in kept.items()} == {
        size: (curve[0], curve[4]) for size, curve in TABLE.items()
    }


def test_a_written_table_is_read_back_with_its_notes_trees_and_context(tmp_path: Path) -> None:
    path, more = tmp_path / "costs.json", ContextCost(2048, {1: {0: 0.5, 4: 0.6}})
    table = StepCosts(TABLE, {2: {8: {4: 3.0}}}, context_cost=more)
    table.notes = {"device": "a card"}
    write_table(table, path)
    assert vars(read_table(path)) == vars(table)
    assert json.loads(path.read_text()).keys() == {"device", "seconds", "smaller_trees", "reading"}


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "costs.json", tmp_path / "link.json"
    link.symlink_to(path)
    write_table(StepCosts(TABLE), link)
    assert link.is_symlink()
    assert read_table(path).seconds == TABLE


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_an_interrupted_write_leaves_the_old_file(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.json"
    write_table(StepCosts(TABLE), path)
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
            write_table(StepCosts({1: {0: 9.0, 4: 9.0}}), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


TREE_OF_COST_0 = '{"seconds": {"1": {"0": 1, "4": 2}}, "smaller_trees": {"5": {"1": {"4": 0}}}}'


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
        (TREE_OF_COST_0, "batch size 1: seconds must be above 0"),
        ('{"seconds": {"1": {"0": 1, "3": 2}}, "reading": {"tokens": 9}}', "'seconds'"),
    ],
)
def test_a_file_without_a_table_is_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="it looks like") as refusal:
        read_table(path)
    assert why in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_table(tmp_path / "none.json")
