"""Rates and latencies by load. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specengine.lab.environment import environment_line
from specengine.lab.serving.measures import Point
from specengine.lab.serving.report import Report

_LOW, _HIGH = "50", "99"


def draw(report: Report, path: Path) -> None:
    """One PNG: a row for the closed loops, one for the rates."""
    from matplotlib.figure import Figure

    closed = [one for one in report.points if one.load.rate is None]
    paced = [one for one in report.points if one.load.rate is not None]
    rows = [one for one in (closed, paced) if one]
    size = (14.0, 4.2 * len(rows))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    for axes, points in zip(figure.subplots(len(rows), 3, squeeze=False), rows, strict=True):
        _rates(axes[0], points)
        _latency(axes[1], points, "ttft", "time to first token, ms")
        _latency(axes[2], points, "tpot", "time per output token, ms")
    figure.suptitle(report.title, fontsize=12)
    figure.supxlabel(f"{report.date}, {environment_line(report.environment)}", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _places(axes: Any, points: list[Point]) -> list[int]:
    is_closed = points[0].load.rate is None
    labels = [f"{p.load.concurrency if is_closed else p.load.rate:g}" for p in points]
    places = list(range(len(points)))
    axes.set_xticks(places, labels)
    axes.set_xlabel("requests at once" if is_closed else "requests a second")
    axes.grid(alpha=0.3)
    return places


def _rates(axes: Any, points: list[Point]) -> None:
    places = _places(axes, points)
    axes.plot(places, [one.output_rate for one in points], "o-", label="output")
    axes.plot(places, [one.prompt_rate for one in points], "s--", label="prompt")
    axes.set_ylabel("tokens a second")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _latency(axes: Any, points: list[Point], name: str, label: str) -> None:
    places = _places(axes, points)
    ranks = points[0].latencies[name].percentiles
    for rank in [one for one in (_LOW, _HIGH) if one in ranks] or list(ranks):
        values = [one.latencies[name].percentiles[rank] for one in points]
        axes.plot(places, values, "o-", label=f"p{rank}")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
