"""A throughput report as tables of text."""

from __future__ import annotations

from collections.abc import Iterator

from specengine.lab.accept.sheet import Sheet
from specengine.lab.card import card_line
from specengine.lab.throughput.report import DEFINITIONS, Point, Report, Setting


def sheets(report: Report) -> Iterator[Sheet]:
    yield _rates(report)
    yield _startup(report)
    peers = [setting for setting in report.settings if setting.peers is not None]
    if peers:
        yield _peers(peers)
    if any(setting.graphs for setting in report.settings):
        yield _graphs(report)


def peer_names(report: Report) -> list[str]:
    found = (setting.peers.rates for setting in report.settings if setting.peers is not None)
    return list(dict.fromkeys(name for rates in found for name in rates))


def peer_rate(setting: Setting, name: str, batch_size: int) -> float | None:
    if setting.peers is None:
        return None
    return setting.peers.rates.get(name, {}).get(batch_size)


def _rates(report: Report) -> Sheet:
    work, names = report.workload, peer_names(report)
    columns = ["setting", "batch size", "tok/s", "τ", "rounds", "drafted a round", "of the limit"]
    if report.plain is not None:
        columns.append("× plain")
    for name in names:
        columns += [name, f"× {name}"]
    chosen = f"at temperature {work.temperature:g}" if work.temperature else "greedy"
    note = (
        f"Best of {work.repeats}: {work.prompt_len}-token prompts, {work.new_tokens} new tokens, "
        f"{chosen}. {DEFINITIONS['tau']} Rounds: a request, after the prefill. {report.limit}"
    )
    if report.card is not None:
        note += " " + card_line(report.card)
    rows = [
        _row(report, setting, point, names)
        for setting in report.settings
        for point in setting.points
    ]
    return Sheet("Output tokens a second", note, columns, rows)


def _row(report: Report, setting: Setting, point: Point, names: list[str]) -> list[str]:
    cells = [
        setting.name + (" (lossy)" if setting.is_lossy else ""),
        str(point.batch_size),
        f"{point.rate:,.0f}" if point.rate >= 100 else f"{point.rate:.1f}",
        _number(point.tau, ".2f"),
        _number(point.rounds, ".1f"),
        _number(point.drafted, ".2f"),
        _number(point.fraction, ".1%"),
    ]
    if report.plain is not None:
        cells.append(_number(report.ratio(setting, point), ".3f"))
    for name in names:
        rate = peer_rate(setting, name, point.batch_size)
        ratio = None if rate is None else point.rate / rate
        cells += [_number(rate, ",.0f"), _number(ratio, ".2f")]
    return cells


def _startup(report: Report) -> Sheet:
    rows = []
    for setting in report.settings:
        start = setting.startup
        if start is not None:
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start.phases.items())
            whole = _number(start.process, ".1f")
            rows.append([setting.name, f"{start.total:.1f}", whole, phases])
    note = (
        "Seconds. The first engine's include reading the model, which those after it share; from "
        "the start of the process: imports as well."
    )
    columns = ["setting", "engine", "from the start of the process", "phases"]
    return Sheet("Start-up", note, columns, rows)


def _peers(settings: list[Setting]) -> Sheet:
    found = settings[0].peers
    assert found is not None
    rows = [
        [name, version, found.startup_seconds.get(name, "–")]
        for name, version in found.engines.items()
    ]
    note = f"{found.date}, {found.source}"
    return Sheet("Peers", note, ["engine", "version and settings", "start-up, s"], rows)


def _graphs(report: Report) -> Sheet:
    rows = []
    for setting in report.settings:
        for kind, one in setting.graphs.items():
            reasons = "; ".join(f"{count} × {why}" for why, count in one["fallbacks"].items())
            rows.append([setting.name, kind, str(one["captures"]), str(one["replays"]), reasons])
    columns = ["setting", "graphs", "captured", "replayed", "fallbacks"]
    return Sheet("Graphs", "Since start, runs that warm up included.", columns, rows)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def settings_lines(report: Report) -> list[str]:
    """How each setting speculates, in Markdown."""
    lines = ["", "## Settings", ""]
    for setting in report.settings:
        options = " ".join(f"{name}={value}" for name, value in setting.options.items())
        lines.append(f"- **{setting.name}**: `{options or 'plain decoding'}`")
    return lines
