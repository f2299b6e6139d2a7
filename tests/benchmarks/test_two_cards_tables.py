"""What two_cards.py noted becomes rows, a model, its drafts and a batch size each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), str(BENCHMARKS / "parallel"), *sys.path])
    import two_cards_tables

    return two_cards_tables


def test_speed_of_two_cards_is_beside_that_of_one(tables: Any) -> None:
    found = {
        "qwen3-30b-a3b-shape plain tp 1 tok/s at (1, 8, 64)": [10.0, 20.0, 40.0],
        "qwen3-30b-a3b-shape plain tp 2 tok/s at (1, 8, 64)": [15.0, 40.0, 40.0],
        "qwen3-30b-a3b-shape plain tp 2 / tp 1": ["1.50", "2.00", "1.00"],
    }
    rows = list(tables.speed(found))
    assert [row["ratio"] for row in rows] == [1.5, 2.0, 1.0]
    assert rows[0]["model"] == "Qwen3-30B-A3B shape"


def test_draft_that_is_whole_on_each_card_has_rows_of_its_own(tables: Any) -> None:
    found = {
        f"llama-3.1-8b-shape {drafts} tp {ranks} batch 8, 3 steps": said
        for drafts in ("eagle3 forced 2.5", "eagle3 forced 2.5, draft whole")
        for ranks, said in (
            (1, "round 5 ms"),
            (2, "round 4 ms; all-reduce 7.5 us, 15% of the round"),
        )
    }
    rows = list(tables.rounds(found))
    assert [row["drafts"] for row in rows] == ["EAGLE-3", "EAGLE-3, draft whole on each card"]
    assert rows[1] | {"one card, ms": 5.0, "two cards, ms": 4.0, "share of all": "15%"} == rows[1]


def test_memory_and_tokens_are_read_from_what_is_printed(tables: Any) -> None:
    said = "{'weights': '7.5 GiB', 'kv': '1.0 GiB', 'graphs': '0.5 GiB'}, weights / formula 1.0100"
    (row,) = tables.memory({"llama-3.1-70b-shape plain tp 2 rank1": said})
    assert (row["ranks"], row["rank"], row["weights / formula"]) == (2, 1, 1.01)
    (row,) = tables.identity({"tiny mtp graphs=False": "DIFFER; 67 accepted; []"})
    assert (row["graphs"], row["tokens"], row["drafts accepted"]) == ("off", "DIFFER", 67)
