"""Rates by batch size, with the card's limit and the peers. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specengine.lab.environment import environment_line
from specengine.lab.throughput.report import Report
from specengine.lab.throughput.sheets import peer_names, peer_rate

_MARKS = ("^", "s", "D", "v")


def draw(report: Report, path: Path) -> None:
    """One PNG: rates, and beside them ratios to plain decoding where that was measured."""
    from matplotlib.figure import Figure

    ratios = report.plain is not None
    figure = Figure(figsize=(12.0 if ratios else 8.0, 5.0), dpi=130, layout="constrained")
    axes = figure.subplots(1, 2 if ratios else 1, squeeze=False)[0]
    _rates(axes[0], report)
    if ratios:
        _ratios(axes[1], report)
    sizes = report.workload.batch_sizes
    for one in axes:
        one.set_xscale("log", base=2)
        one.set_xticks(sizes, [str(size) for size in sizes])
        one.set_xlabel("batch size")
        one.grid(alpha=0.3)
        one.legend(fontsize=8)
    figure.suptitle(report.title, fontsize=12)
    figure.supxlabel(f"{report.date}, {environment_line(report.environment)}", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _rates(axes: Any, report: Report) -> None:
    for number, setting in enumerate(report.settings):
        colour = f"C{number}"
        sizes = [point.batch_size for point in setting.points]
        axes.plot(sizes, [p.rate for p in setting.points], "o-", color=colour, label=setting.name)
        limits = [(p.batch_size, p.limit) for p in setting.points if p.limit is not None]
        if limits:
            label = f"{setting.name}: the card's limit"
            axes.plot(*zip(*limits, strict=True), ":", color=colour, label=label)
        for mark, name in zip(_MARKS, peer_names(report), strict=False):
            found = [(size, peer_rate(setting, name, size)) for size in sizes]
            known = [(size, rate) for size, rate in found if rate is not None]
            if known:
                label = f"{name}, {setting.name}"
                axes.plot(*zip(*known, strict=True), mark, color=colour, mfc="none", label=label)
    axes.set_yscale("log")
    axes.set_ylabel("output tokens a second")


def _ratios(axes: Any, report: Report) -> None:
    for number, setting in enumerate(report.settings):
        if setting is not report.plain:
            ratios = [(p.batch_size, report.ratio(setting, p)) for p in setting.points]
            axes.plot(*zip(*ratios, strict=True), "o-", color=f"C{number}", label=setting.name)
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":", label="no gain")
    axes.set_ylabel("× plain decoding in the same run")
    axes.set_ylim(bottom=0)
