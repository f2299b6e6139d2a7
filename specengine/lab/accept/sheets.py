"""A report as tables, for the terminal and for Markdown alike."""

from __future__ import annotations

from collections.abc import Iterator

from specengine.lab.accept.detail_sheets import detail_sheets
from specengine.lab.accept.report import DEFINITION, INTERVALS, POSITIONS, ROUNDS, Report
from specengine.lab.accept.sheet import (
    MOST_COLUMNS,
    NamedRun,
    Sheet,
    interval,
    labels,
    named_runs,
    percent,
    tau,
)


def sheets(report: Report) -> Iterator[Sheet]:
    """Those that have something to say."""
    runs = named_runs(report)
    if runs:
        yield from _acceptance(report, runs)
        yield from detail_sheets(runs)
    if any(setting.speed for setting in report.settings):
        yield _speed(report)
    if any(setting.error for setting in report.settings):
        rows = [[one.name, one.error] for one in report.settings if one.error]
        yield Sheet("Not measured", "", ["setting", "why"], rows)


def _acceptance(report: Report, runs: list[NamedRun]) -> Iterator[Sheet]:
    yield _by_set(runs)
    if report.differences:
        yield _differences(report)
    yield _positions("Conditional acceptance by position", POSITIONS, runs, conditional=True)
    yield _positions("Joint acceptance by position", "As above.", runs, conditional=False)


def _by_set(runs: list[NamedRun]) -> Sheet:
    names = labels(runs, lambda summary: summary.by_set)
    rows = []
    for one in runs:
        found = {group.label: group for group in one.summary.by_set}
        overall, run = one.summary.overall, one.run
        rows.append(
            [
                one.name + (" (LOSSY)" if one.setting.is_lossy else ""),
                *(tau(found.get(name)) for name in names),
                *([tau(overall)] if len(names) > 1 else []),
                percent(overall.first),
                f"{one.summary.drafted_per_round:.2f}",
                str(overall.prompts),
                str(overall.rounds),
                f"{run.same_answers}/{run.answers}",
            ]
        )
    every = ["all"] if len(names) > 1 else []
    counts = ["1st accepted", "drafted/round", "prompts", "rounds", "same answers"]
    note = (
        f"{DEFINITION} {ROUNDS} {INTERVALS} Same answers: token for token those of "
        f"{runs[0].run.conversation}, whose answers are between the questions of all "
        "conversations."
    )
    return Sheet("Accepted length τ", note, ["setting", *names, *every, *counts], rows)


def _differences(report: Report) -> Sheet:
    several = len(report.protocol["temperatures"]) > 1
    rows = [
        [
            f"{one.first} − {one.second}" + (f", T={one.temperature:g}" if several else ""),
            one.label,
            interval(one.tau, sign="+"),
            "yes" if one.is_clear else "no",
            str(one.tau.prompts),
        ]
        for one in report.differences
    ]
    note = "τ of the one less τ of the other on the same prompts. Clear: the interval excludes 0."
    return Sheet("Differences, paired", note, ["pair", "set", "Δτ", "clear", "prompts"], rows)


def _positions(title: str, note: str, runs: list[NamedRun], conditional: bool) -> Sheet:
    most = max((len(one.summary.positions) for one in runs), default=0)
    shown = min(most, MOST_COLUMNS)
    rows = []
    for one in runs:
        found = [p.conditional if conditional else p.joint for p in one.summary.positions]
        cells = [percent(estimate) for estimate in found[:shown]]
        rows.append([one.name, *cells, *[""] * (shown - len(cells))])
    return Sheet(title, note, ["setting", *map(str, range(1, shown + 1))], rows)


def _speed(report: Report) -> Sheet:
    on_gpu = report.target["device"] == "cuda"
    rows = []
    for setting in report.settings:
        if (speed := setting.speed) is None:
            continue
        rates = [f"{max(speed.setting):.0f}", f"{max(speed.plain):.0f}"] if on_gpu else []
        spread = f"{min(speed.ratios):.2f} to {max(speed.ratios):.2f}"
        sizes = [str(speed.batch_size), str(speed.prompts), str(len(speed.ratios))]
        sizes.append(f"{speed.tau:.2f}")
        rows.append([setting.name, f"{speed.ratio:.2f}×", spread, *rates, *sizes])
    absolute = ["tok/s, best", "plain tok/s, best"] if on_gpu else []
    device = "GPU" if on_gpu else "CPU, ratios only: absolute speed of a CPU says little"
    note = (
        f"Wall clock ({device}): whole answers, prefill included, beside plain decoding of the "
        "same prompts in the same process, in turns; the median over repeats, and their range. τ "
        "timed: the engine's own count on these prompts, without the recorder."
    )
    counts = ["batch", "prompts", "repeats", "τ timed"]
    columns = ["setting", "speed / plain", "range", *absolute, *counts]
    return Sheet("Speed", note, columns, rows)
