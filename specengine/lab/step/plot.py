"""The parts of a round by batch size, as bars. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from specengine.lab.environment import environment_line
from specengine.lab.step.report import Report


def draw(report: Report, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.0), dpi=130, layout="constrained")
    axes = figure.subplots()
    places = list(range(len(report.points)))
    heights = [0.0] * len(places)
    for name in dict.fromkeys(name for step in _bars(report) for name in step):
        values = [1000 * step.get(name, 0.0) for step in _bars(report)]
        axes.bar(places, values, 0.7, bottom=heights, label=name)
        heights = [low + value for low, value in zip(heights, values, strict=True)]
    for place, step in zip(places, report.points, strict=True):
        if step.least is not None:
            least = 1000 * step.least
            axes.hlines(least, place - 0.4, place + 0.4, "black", "dashed")
    axes.plot([], [], "k--", label="the card's limit")
    axes.set_xticks(places, [str(step.batch_size) for step in report.points])
    axes.set_xlabel("batch size")
    axes.set_ylabel("ms a round")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    figure.suptitle(report.title, fontsize=12)
    figure.supxlabel(f"{report.date}, {environment_line(report.environment)}", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _bars(report: Report) -> list[dict[str, float]]:
    bars = []
    for step in report.points:
        bar = {part.name: part.seconds for part in step.parts}
        if step.between is not None:
            bar["idle within"] = sum(part.idle for part in step.parts)
            bar["between rounds"] = step.between
        bars.append(bar)
    return bars
