"""A step report as tables of text."""

from __future__ import annotations

from collections.abc import Iterator

from specengine.lab.accept.sheet import Sheet
from specengine.lab.card import card_line
from specengine.lab.step.attribution import nodes_in_order
from specengine.lab.step.report import PARTS, Part, Report, Step

_NAME = 70  # characters of a kernel's


def sheets(report: Report, with_nodes: bool = False) -> Iterator[Sheet]:
    for step in report.points:
        yield _parts(report, step)
        if step.host:
            yield _host(step)
        if with_nodes and step.nodes:
            yield _nodes(step)
    yield Sheet("Parts", report.limit, ["part", "is"], [[*pair] for pair in PARTS.items()])


def _parts(report: Report, step: Step) -> Sheet:
    clock = (
        "kernels of captured rounds, the mean of the middle half"
        if step.is_captured
        else "the host's clock around each part"
    )
    note = (
        f"{step.rounds} rounds of {step.batch_size} requests, {step.steps:.2f} drafts each, "
        f"{step.context:.0f} tokens of context on average; {clock}. {card_line(report.card)}"
    )
    columns = ["part", "µs", "share", "idle before, µs", "kernels"]
    columns += ["MB", "Gflop", "at least, µs", "of the limit"]
    rows = [_row(part, step.seconds) for part in step.parts]
    if step.between is not None:
        share = f"{step.between / step.seconds:.1%}"
        rows.append(["between rounds", _micro(step.between), share, *["–"] * 6])
    idle, kernels = sum(part.idle for part in step.parts), len(step.nodes)
    least = step.least
    rows.append(
        [
            *["a round", _micro(step.seconds), "100.0%", _micro(idle), str(kernels or "–")],
            _sum([part.bytes for part in step.parts], 1e6),
            _sum([part.operations for part in step.parts], 1e9),
            "–" if least is None else _micro(least),
            "–" if least is None else f"{least / step.seconds:.1%}",
        ]
    )
    return Sheet(f"Batch size {step.batch_size}", note, columns, rows)


def _row(part: Part, whole: float) -> list[str]:
    return [
        part.name,
        _micro(part.seconds),
        f"{(part.seconds + part.idle) / whole:.1%}",
        _micro(part.idle),
        "–" if part.kernels is None else str(part.kernels),
        "–" if part.bytes is None else f"{part.bytes / 1e6:.3g}",
        "–" if part.operations is None else f"{part.operations / 1e9:.3g}",
        "–" if part.least is None else _micro(part.least),
        "–" if part.fraction is None else f"{part.fraction:.1%}",
    ]


def _host(step: Step) -> Sheet:
    rows = [[name, _micro(seconds)] for name, seconds in step.host.items()]
    calls = ", ".join(f"{name} {count:.2f}" for name, count in step.calls.items())
    note = f"While the device runs, without a profiler. Calls of the driver, a round: {calls}."
    title = f"Batch size {step.batch_size}: the host, a round"
    return Sheet(title, note, ["host", "µs"], rows)


def _nodes(step: Step) -> Sheet:
    rows = [
        [str(place), node.part, node.name[:_NAME], f"{node.busy:.2f}", f"{node.idle:.2f}"]
        for place, node in enumerate(step.nodes)
    ]
    title = f"Batch size {step.batch_size}: nodes of the graph"
    note = "In order: " + ", ".join(nodes_in_order(step.nodes)) + "."
    return Sheet(title, note, ["node", "part", "kernel", "µs", "idle before, µs"], rows)


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _sum(values: list[float | None], unit: float) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / unit:.3g}" if known else "–"
