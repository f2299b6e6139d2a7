"""A report as plots that can be read without it. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specengine.core.errors import ConfigError
from specengine.lab.accept.bootstrap import Estimate
from specengine.lab.accept.report import Report
from specengine.lab.accept.sheet import NamedRun, find_group, labels, named_runs
from specengine.lab.accept.statistics import Group
from specengine.lab.accept.summary import Summary

_SIZE = (9.0, 5.0)  # inches
_DOTS = 130  # an inch
_BARS = "bars: 95% bootstrap interval over prompts"


def check_matplotlib() -> None:
    """Raises ConfigError where it is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--out draws plots with matplotlib, which is not installed: pip install "
            "'specengine[bench]', or write the numbers alone with --json"
        )


def draw_plots(report: Report, directory: Path, stem: str) -> dict[str, Path]:
    """PNG files by title; none where nothing was measured."""
    runs = named_runs(report)
    if not runs:
        return {}
    drawn = {}
    for name, title, draw in _plots(runs):
        path = directory / f"{stem}-{name}.png"
        _save(path, title, _subtitle(report, runs), draw)
        drawn[title] = path
    return drawn


Draw = Callable[[Any], None]  # on matplotlib axes


def _plots(runs: list[NamedRun]) -> Iterator[tuple[str, str, Draw]]:
    """File name, title, and how."""
    yield "tau", "Accepted length τ by prompt set", partial(_bars, runs=runs)
    yield "positions", "Acceptance by position", partial(_positions, runs=runs)
    yield "histogram", "Tokens that a round emits", partial(_histogram, runs=runs)
    context = partial(
        _groups,
        runs=runs,
        groups=lambda summary: summary.by_context,
        unit="context before the round, tokens",
    )
    yield "context", "Accepted length τ by context length", context
    entropy = partial(
        _groups,
        runs=runs,
        groups=lambda summary: summary.by_entropy,
        unit="entropy of the target after the root, nats",
    )
    yield "entropy", "Accepted length τ by target entropy", entropy
    if any(one.summary.calibration for one in runs):
        title = "Reliability of the draft's confidence"
        yield "reliability", title, partial(_reliability, runs=runs)


def _bars(axes: Any, runs: list[NamedRun]) -> None:
    names = labels(runs, lambda summary: summary.by_set)
    width = 0.8 / len(runs)
    for number, one in enumerate(runs):
        found = [find_group(one.summary.by_set, name) for name in names]
        there = [(place, group) for place, group in enumerate(found) if group is not None]
        estimates = [group.tau for _, group in there]
        places = [place + (number - (len(runs) - 1) / 2) * width for place, _ in there]
        heights = [estimate.value for estimate in estimates]
        bars = axes.bar(places, heights, width * 0.92, yerr=_errors(estimates), label=one.name)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=7)
    groups = [find_group(runs[0].summary.by_set, name) for name in names]
    axes.set_xticks(
        range(len(names)),
        [f"{g.label}\n{g.prompts} prompts" if g is not None else "" for g in groups],
    )
    axes.margins(y=0.1)  # for the numbers above
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_ylabel("τ, tokens a round (bonus included)")


def _positions(axes: Any, runs: list[NamedRun]) -> None:
    for number, one in enumerate(runs):
        shift = _aside(number, runs)
        places = [p.position + shift for p in one.summary.positions]
        colour = f"C{number % 10}"
        for kind, style in (("conditional", "-"), ("joint", "--")):
            estimates = [getattr(p, kind) for p in one.summary.positions]
            _line(axes, places, estimates, label=f"{one.name}, {kind}", fmt=f"o{style}", c=colour)
    most = max((len(one.summary.positions) for one in runs), default=1)
    axes.set_xticks(range(1, max(most, 1) + 1))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("position below the root (conditional: of rounds that tried it; joint: of all)")
    axes.set_ylabel("share accepted")


def _histogram(axes: Any, runs: list[NamedRun]) -> None:
    width = 0.8 / len(runs)
    for number, one in enumerate(runs):
        counts = one.summary.histogram
        rounds = max(sum(counts), 1)
        shift = (number - (len(runs) - 1) / 2) * width
        places = [length + shift for length in range(1, len(counts) + 1)]
        label = f"{one.name} (n = {rounds} rounds)"
        axes.bar(places, [count / rounds for count in counts], width * 0.92, label=label)
    axes.set_xticks(range(1, max(len(one.summary.histogram) for one in runs) + 1))
    axes.set_xlabel("tokens emitted in a round, the bonus included")
    axes.set_ylabel("share of rounds")


def _groups(
    axes: Any, runs: list[NamedRun], groups: Callable[[Summary], Sequence[Group]], unit: str
) -> None:
    names = labels(runs, groups)
    for number, one in enumerate(runs):
        found = [(place, find_group(groups(one.summary), name)) for place, name in enumerate(names)]
        there = [(place, group.tau) for place, group in found if group is not None]
        places = [place + _aside(number, runs) for place, _ in there]
        estimates = [tau for _, tau in there]
        _line(axes, places, estimates, label=one.name, fmt="o-", c=f"C{number % 10}")
    counts = [find_group(groups(runs[0].summary), name) for name in names]
    ticks = [
        f"{name}\nn={group.rounds if group is not None else 0}"
        for name, group in zip(names, counts, strict=True)
    ]
    axes.set_xticks(range(len(names)), ticks, fontsize=8)
    axes.set_xlabel(f"{unit}; n: rounds of {runs[0].name}")
    axes.set_ylabel("τ, tokens a round (bonus included)")
    axes.set_ylim(bottom=0.9)


def _reliability(axes: Any, runs: list[NamedRun]) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":", label="calibrated")
    for number, one in enumerate(runs):
        found = one.summary.calibration
        if found is not None:
            label = f"{one.name}: ECE {found.ece:.3f}, n = {found.nodes} nodes"
            means, rates = [b.mean for b in found.bins], [b.rate for b in found.bins]
            _line(axes, means, rates, label=label, fmt="o-", c=f"C{number % 10}")
    axes.set_xlabel("confidence that the path down to a node is accepted, mean of its bin")
    axes.set_ylabel("share of nodes accepted")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)


def _line(
    axes: Any,
    places: Sequence[float],
    estimates: Sequence[Estimate],
    *,
    label: str,
    fmt: str,
    c: str,
) -> None:
    values = [estimate.value for estimate in estimates]
    axes.errorbar(
        places, values, yerr=_errors(estimates), label=label, fmt=fmt, color=c, capsize=3, ms=4
    )


def _aside(number: int, runs: list[NamedRun]) -> float:
    """Each setting a little beside the others, so that its interval can be seen."""
    return 0.04 * (number - (len(runs) - 1) / 2)


def _errors(estimates: Sequence[Estimate]) -> tuple[list[float], list[float]]:
    """How far the intervals reach below and above; 0 where there is none."""
    below = [_reach(one.value - one.low) for one in estimates]
    return below, [_reach(one.high - one.value) for one in estimates]


def _reach(length: float) -> float:
    return 0.0 if math.isnan(length) else max(length, 0.0)


def _subtitle(report: Report, runs: list[NamedRun]) -> str:
    overall = runs[0].summary.overall
    temperatures = ", ".join(f"{value:g}" for value in report.protocol["temperatures"])
    device = report.environment["gpu"] or report.environment["cpu"]
    return (
        f"{report.target['name']}, {report.target['dtype']}, temperature {temperatures}, up to "
        f"{report.protocol['max_new_tokens']} new tokens, {overall.prompts} prompts, {_BARS}\n"
        f"{report.date}, {device}, commit {report.environment['commit']}"
    )


def _save(path: Path, title: str, subtitle: str, draw: Draw) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DOTS, layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(title, fontsize=12)
    axes.set_title(subtitle, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
