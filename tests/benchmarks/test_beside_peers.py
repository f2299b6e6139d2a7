"""A table of this engine beside its peers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_layering import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks/peers")
    return importlib.import_module("beside")


def report_of(path: Path, **rates: list[float]) -> str:
    """rates: of batch sizes 1 and 8, by the setting's name."""
    settings = [
        {
            "name": name.replace("_", " "),
            "points": [
                {"batch_size": size, "rate": rate}
                for size, rate in zip((1, 8), of_sizes, strict=False)
            ],
        }
        for name, of_sizes in rates.items()
    ]
    path.write_text(json.dumps({"settings": settings, "environment": {"commit": "abc"}}))
    return str(path)


def test_each_work_has_its_ratio_to_the_better_peer_at_each_size(
    script: ModuleType, tmp_path: Path
) -> None:
    found: dict[Any, Any] = {
        ("A", "plain", "vLLM"): {1: 100.0, 8: 700.0},
        ("A", "plain", "SGLang"): {1: 80.0},
        ("A", "plain", "specengine"): {1: 120.0, 8: 350.0},
        ("A", "EAGLE-3", "specengine"): {1: 300.0},
    }
    rows = {(row["drafts"], row["engine"]): row for row in script.rows_of(found)}
    ratio = rows["plain", script.RATIO]
    assert (ratio["batch 1"], ratio["batch 8"]) == (1.2, 0.5)
    assert rows["plain", "SGLang"]["batch 8"] is None
    assert ("EAGLE-3", script.RATIO) not in rows


def test_works_that_are_not_given_keep_their_rows(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.report, "RESULTS", tmp_path)
    pages: list[list[dict[str, Any]]] = []

    def write(topic: str, name: str, title: str, rows: Any, *_: Any) -> str:
        pages.append(rows)
        columns = list(rows[0])
        table = {"columns": columns, "rows": [[row[one] for one in columns] for row in rows]}
        (tmp_path / f"{topic}.json").write_text(json.dumps({"tables": {name: table}}))
        return title

    monkeypatch.setattr(script.report, "write", write)
    ours = report_of(tmp_path / "o.json", no_speculation=[120.0, 900.0], EAGLE3=[200.0, 1000.0])
    theirs = report_of(tmp_path / "v.json", no_speculation=[100.0, 600.0])
    common = ["two", "beside", "--title", "T"]
    script.main([*common, f"A: specengine={ours}", f"A: vLLM={theirs}"])
    cards = tmp_path / "cards.json"
    cards.write_text(json.dumps({"speed": {"tiny plain tp 2 tok/s at (1, 8)": [10.0, 20.0]}}))
    script.main([*common, f"B: specengine={cards}", f"B: vLLM={theirs}"])
    rows = {(row["work"], row["drafts"], row["engine"]): row for row in pages[-1]}
    assert rows["A", "plain", script.RATIO]["batch 8"] == 1.5
    assert rows["B", "plain", script.RATIO]["batch 1"] == 0.1
    assert rows["A", "EAGLE-3", "specengine"]["batch 8"] == 1000.0
