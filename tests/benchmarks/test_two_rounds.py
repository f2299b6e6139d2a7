"""What two_rounds.py files of a round that `bench step` measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specengine.lab.card import Card
from specengine.lab.step.report import Part, Report, Step
from specengine.lab.throughput.workload import Workload

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def two_rounds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), str(BENCHMARKS / "step"), *sys.path])
    import two_rounds

    return two_rounds


def written(between: float | None) -> dict[str, Any]:
    """The JSON of one point: parts of 90 us, and what follows them."""
    parts = [Part("draft", 60e-6, kernels=20), Part("verify", 30e-6, kernels=17)]
    step = Step(8, True, 3.0, 100.0, 5, 90e-6 + (between or 0.0), parts, between)
    card = Card("some GPU", "bfloat16", 4e12, 7e14)
    report = Report("2026-11-27", {}, {"name": "tiny"}, {}, Workload(), card, "by hand", [step])
    parsed: dict[str, Any] = json.loads(report.to_json())
    return parsed


@pytest.mark.parametrize("between", [25e-6, 0.0, None])
def test_round_is_filed_without_the_gap_before_the_next_one(
    two_rounds: Any, between: float | None
) -> None:
    (row,) = two_rounds.rounds_of(written(between))
    assert row["a round"] == pytest.approx(90.0)
    assert (row["batch"], row["kernels"]) == (8, 37)
