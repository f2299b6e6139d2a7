"""Tables of text: what they are, and how numbers are written in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specengine.lab.accept.bootstrap import Estimate
from specengine.lab.accept.report import Report, RunResult, SettingResult
from specengine.lab.accept.statistics import Bucket, Group
from specengine.lab.accept.summary import Summary

MOST_COLUMNS = 8  # positions and lengths that a table shows; the JSON has all


@dataclass(frozen=True)
class Sheet:
    title: str
    note: str  # what the numbers are
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class NamedRun:
    name: str  # of the setting, and the temperature where there are several
    setting: SettingResult
    run: RunResult

    @property
    def summary(self) -> Summary:
        return self.run.summary


def named_runs(report: Report) -> list[NamedRun]:
    several = len(report.protocol["temperatures"]) > 1
    return [
        NamedRun(
            f"{setting.name}, T={run.temperature:g}" if several else setting.name, setting, run
        )
        for setting in report.settings
        for run in setting.runs
    ]


def interval(one: Estimate, sign: str = "") -> str:
    if math.isnan(one.value):
        return "–"
    value = f"{one.value:{sign}.2f}"
    return value if math.isnan(one.low) else f"{value} [{one.low:{sign}.2f}, {one.high:{sign}.2f}]"


def percent(one: Estimate) -> str:
    if math.isnan(one.value):
        return "–"
    value = f"{100 * one.value:.1f}%"
    return value if math.isnan(one.low) else f"{value} [{100 * one.low:.0f}, {100 * one.high:.0f}]"


def tau(group: Group | None) -> str:
    return "–" if group is None else interval(group.tau)


def rate(bucket: Bucket | None) -> str:
    return "–" if bucket is None else f"{percent(bucket.rate)} n={bucket.rate.count}"


def labels(
    runs: Sequence[NamedRun], parts: Callable[[Summary], Sequence[Group] | Sequence[Bucket]]
) -> list[str]:
    """Of all runs; those that begin with a number in its order."""
    found = dict.fromkeys(part.label for one in runs for part in parts(one.summary))
    return sorted(found, key=_number)


def _number(label: str) -> float:
    try:
        return float(label.split()[0])
    except ValueError:
        return 0.0


def find_group(groups: Sequence[Group], label: str) -> Group | None:
    return next((group for group in groups if group.label == label), None)


def find_bucket(buckets: Sequence[Bucket], label: str) -> Bucket | None:
    return next((bucket for bucket in buckets if bucket.label == label), None)
