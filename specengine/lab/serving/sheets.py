"""Tables of a serving bench."""

from __future__ import annotations

from collections.abc import Iterator

from specengine.lab.accept.sheet import Sheet
from specengine.lab.serving.measures import DEFINITIONS, Latency, Point
from specengine.lab.serving.report import Report

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end"}


def sheets(report: Report) -> Iterator[Sheet]:
    yield _rates(report)
    yield _latencies(report)
    if report.num_failed:
        yield _errors(report)


def _rates(report: Report) -> Sheet:
    columns = ["load", "finished", "s", "requests/s", "output tok/s", "prompt tok/s"]
    if report.slo:
        columns.append("goodput, requests/s")
    if any(one.tau is not None for one in report.points):
        columns.append("τ")
    columns.append("client busy")
    rows = [_rate_row(report, one, "τ" in columns) for one in report.points]
    note = f"{DEFINITIONS['rates']} {_busy_note(report)}".strip()
    if report.slo:
        bounds = ", ".join(f"{_NAMES[name]} ≤ {bound:g} ms" for name, bound in report.slo.items())
        note += f" Goodput: {bounds}."
    if not all(one.is_counted for one in report.points):
        note += " The server sent no usage: events were counted as tokens."
    return Sheet("Rates", note, columns, rows)


def _rate_row(report: Report, point: Point, has_tau: bool) -> list[str]:
    row = [
        point.load.name,
        f"{point.num_finished}/{point.num_requests}",
        f"{point.seconds:.1f}",
        f"{point.request_rate:.2f}",
        f"{point.output_rate:,.0f}",
        f"{point.prompt_rate:,.0f}",
    ]
    if report.slo:
        row.append("–" if point.goodput is None else f"{point.goodput:.2f}")
    if has_tau:
        row.append("–" if point.tau is None else f"{point.tau:.2f}")
    return [*row, f"{100 * point.client_busy:.0f}% of {point.num_clients}"]


def _busy_note(report: Report) -> str:
    busy = any(one.client_busy > 0.8 for one in report.points)
    late = max((one.latest_start for one in report.points if one.load.rate is not None), default=0)
    notes = ["The clients were the limit: use more --clients, or a machine apart."] if busy else []
    if late > 0.02:
        notes.append(f"A request was sent {1000 * late:.0f} ms after it was due.")
    return " ".join(notes)


def _latencies(report: Report) -> Sheet:
    rows = []
    for point in report.points:
        for name, found in point.latencies.items():
            rows.append([point.load.name, _NAMES[name], *_cells(found)])
    ranks = list(report.points[0].latencies["ttft"].percentiles) if report.points else []
    columns = ["load", "ms", "mean", *(f"p{rank}" for rank in ranks)]
    note = " ".join(f"{_NAMES[one]}: {DEFINITIONS[one]}" for one in _NAMES)
    return Sheet("Latencies", note, columns, rows)


def _cells(found: Latency) -> list[str]:
    return [_ms(one) for one in (found.mean, *found.percentiles.values())]


def _ms(number: float) -> str:
    return "–" if number != number else f"{number:,.2f}" if number < 100 else f"{number:,.0f}"


def _errors(report: Report) -> Sheet:
    rows = [
        [point.load.name, kind, str(count), point.samples[kind][:120]]
        for point in report.points
        for kind, count in point.errors.items()
    ]
    return Sheet("Failures", "", ["load", "status", "requests", "for example"], rows)
