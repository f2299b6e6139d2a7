"""Tables that a measurement writes elsewhere, and that are taken into their topics afterwards."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_layering import ROOT


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    found = importlib.import_module("report")
    monkeypatch.setattr(found, "RESULTS", tmp_path / "results")
    found.RESULTS.mkdir()
    topic = {"title": "T", "summary": "s", "tables": {}}
    (found.RESULTS / "topic.json").write_text(json.dumps(topic))
    return found


def tables(report: ModuleType) -> Any:
    return json.loads((report.RESULTS / "topic.json").read_text())["tables"]


def test_table_written_elsewhere_leaves_topic_alone_until_it_is_taken(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BENCHMARK_TABLES", str(tmp_path / "job/tables"))
    file = report.write("topic", "one.two", "Title", [{"a": 1.23456, "b": "x"}], "A note.")
    assert file == tmp_path / "job/tables/topic.one.two.json"
    assert tables(report) == {}
    report.take([file])
    monkeypatch.delenv("BENCHMARK_TABLES")
    taken = tables(report)["one.two"]
    report.write("topic", "one.two", "Title", [{"a": 1.23456, "b": "x"}], "A note.")
    assert tables(report)["one.two"] == taken
    assert taken["rows"] == [[1.235, "x"]]
    assert "| 1.235 | x |" in (report.RESULTS / "topic.md").read_text()


def facts(command: str) -> dict[str, Any]:
    return {"command": command, "commit": "abc", "cpu": "c", "versions": {}}


def test_tables_of_one_name_are_joined_row_after_row(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = []
    for job in ("first", "second"):
        monkeypatch.setenv("BENCHMARK_TABLES", str(tmp_path / job))
        files.append(report.write("topic", "one", "T", [{"a": job}], "", facts(f"x {job}")))
    report.take(files)
    joined = tables(report)["one"]
    assert joined["rows"] == [["first"], ["second"]]
    assert joined["environment"]["command"] == "x first\nx second"
    assert joined["environment"]["commit"] == "abc"
    other = report.write("topic", "one", "T", [{"b": 1}], "", facts("y"))
    other = other.rename(tmp_path / "topic.one.json")
    with pytest.raises(SystemExit, match="columns"):
        report.take([files[0], other])


def test_command_of_a_table_names_no_folder_of_a_lease(report: ModuleType) -> None:
    command = (
        "python x.py --json /tmp/lease-a1/jobs/8b.x/a.json --logs /tmp/lease-a1/jobs/8b.x -n 5"
    )
    report.write("topic", "one", "T", [{"a": 1}], "", facts(command))
    (found,) = (one["environment"]["command"] for one in tables(report).values())
    assert found == "python x.py --json OUT/a.json --logs OUT -n 5"


def test_table_of_no_topic_is_refused(report: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "other.one.json").write_text('{"tables": {}}')
    with pytest.raises(SystemExit, match="no topic other"):
        report.take([tmp_path / "other.one.json"])
