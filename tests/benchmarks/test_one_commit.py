"""What one_commit.py takes of the tree that it runs, whose commit may be old."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specengine.core.spec_stats import SpecStats

STEP = Path(__file__).parents[2] / "benchmarks" / "step"


@pytest.fixture
def one_commit(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(STEP), *sys.path])
    import one_commit

    return one_commit


def test_rounds_of_a_run_are_read_under_the_name_of_its_commit(one_commit: Any) -> None:
    stats = SpecStats()
    stats.record(drafted=3, accepted=1)
    assert one_commit.num_rounds(stats) == 1
    assert one_commit.num_rounds(SimpleNamespace(num_steps=7)) == 7
