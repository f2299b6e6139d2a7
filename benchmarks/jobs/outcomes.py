"""A plugin of pytest: a line of JSON in a file as soon as a test has ended, so that a run that is
cut leaves what it knows.

    python -m pytest -p benchmarks.jobs.outcomes --outcomes FILE.jsonl …

With workers of pytest-xdist the process that started them writes. A line has "id", "outcome"
(passed, failed or skipped), "seconds" and, where it failed, "text".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="a line of JSON a test")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--outcomes")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Lines(file))


class _Lines:
    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("w")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write(report, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report, 0.0)

    def _write(self, report: Any, seconds: float) -> None:
        line = {"id": report.nodeid, "outcome": report.outcome, "seconds": round(seconds, 2)}
        if report.failed:
            line["text"] = report.longreprtext[-6000:]
        print(json.dumps(line), file=self._file, flush=True)
