"""A file of round costs: made by one engine, read by the next, and refused by any other."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from specengine.core.config import SpecConfig
from specengine.core.errors import ConfigError
from specengine.engine.adaptive.cost_file import CostFile
from specengine.engine.adaptive.costs import RunningCosts, StepCosts

TABLE = {1: {0: 0.1, 4: 1 / 3}, 8: {0: 2.0, 4: 4.4}}
FACTS = {"model": "a model", "dtype": "float32", "depths": [0, 4], "trees": {4: [2]}}


def named(path: Path, **more: Any) -> CostFile | None:
    return CostFile.of(SpecConfig(algorithm="NGRAM", cost_table=str(path), **more))


def settled(path: Path, **more: object) -> CostFile:
    found = named(path)
    assert found is not None
    found.settle({**FACTS, **more})
    return found


def refuse() -> StepCosts:
    raise AssertionError("measured")


def test_measured_once_and_read_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "costs.json"
    first = settled(path).read_or(lambda: StepCosts(TABLE, {2: {8: {4: 3.0}}}))
    with caplog.at_level(logging.INFO):
        second = settled(path).read_or(refuse)
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
def test_what_was_measured_for_something_else_is_refused(
    other: dict[str, object], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    settled(path).read_or(lambda: StepCosts(TABLE))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"costs\.json was .*: {told}; delete the file"):
        settled(path, **other)
    assert path.read_bytes() == before


def test_a_fact_that_is_gone_is_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    settled(path, quantization="int8").read_or(lambda: StepCosts(TABLE))
    with pytest.raises(ConfigError, match="quantization was 'int8' and is None"):
        settled(path)


def test_a_table_by_hand_holds_for_all(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"seconds": {"1": {"0": 1, "4": 2}}, "by": "me"}')
    found, costs = settled(path), RunningCosts()
    assert found.by_hand is not None
    assert found.by_hand.seconds == found.read_or(refuse).seconds == {1: {0: 1.0, 4: 2.0}}
    assert found.read_or(refuse).notes == {"by": "me"}
    own = tmp_path / "own.json"
    settled(own).read_or(lambda: StepCosts(TABLE))
    assert settled(own).by_hand is None
    settled(own).start(costs)
    assert costs.of(1, 4) == 1 / 3


@pytest.mark.parametrize("where", ["none/costs.json", "file/costs.json", "/proc/self/costs.json"])
def test_where_no_file_can_be_made(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--speculative-cost-table .*name one in a folder"):
        named(tmp_path / where)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no table of round costs"):
        named(tmp_path)


def test_asking_leaves_nothing_behind(tmp_path: Path) -> None:
    assert named(tmp_path / "costs.json") is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fixed", [{"algorithm": None}, {"adaptive": False}], ids=str)
def test_who_chooses_nothing_reads_nothing(fixed: dict[str, Any], tmp_path: Path) -> None:
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


def test_what_cannot_be_kept_is_used_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder went away while costs were measured."""
    folder = tmp_path / "folder"
    folder.mkdir()
    found = settled(folder / "costs.json")
    folder.rmdir()
    assert found.read_or(lambda: StepCosts(TABLE)).seconds == TABLE
    assert "round costs are not kept" in caplog.text


def test_rounds_that_teach_too_little_keep_nothing(tmp_path: Path) -> None:
    """Nor do they take the place of what was learned before."""
    path, costs = tmp_path / "costs.json", RunningCosts()
    settled(path).keep_learned(costs)
    assert not path.exists()
    settled(path).read_or(lambda: StepCosts(TABLE))
    settled(path).start(costs)
    settled(path).keep_learned(costs)
    kept = StepCosts.read(path).seconds
    assert {size: (curve[0], curve[4]) for size, curve in kept.items()} == {
        size: (curve[0], curve[4]) for size, curve in TABLE.items()
    }
