"""Reports of `specengine bench accept|serve|step|throughput --json`, and of scripts of peers/, as
tables of benchmarks/results."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

Reports = dict[str, dict[str, Any]]  # by the label that their rows get
Rows = list[dict[str, Any]]
PLAIN = "no speculation"


def read(reports: Reports, kind: str | None = None) -> Rows:
    first = next(iter(reports.values()))
    if kind is None and "first_token" in first:
        kind = "first-token"
    elif kind is None and "experts" in first:
        kind = "experts"
    elif kind is None and "points" in first:
        kind = "serve" if "requests" in first else "step"
    elif kind is None:
        kind = "accept" if "runs" in first["settings"][0] else "throughput"
    return KINDS[kind](reports)


def facts(reports: Reports) -> dict[str, Any]:
    """The environment of the first report, with the commits and commands of all."""
    all_of = [one["environment"] for one in reports.values()]
    commits = ", ".join(dict.fromkeys(one["commit"] for one in all_of))
    commands = "\n".join(dict.fromkeys(one["command"] for one in all_of))
    return {**all_of[0], "commit": commits, "command": commands}


def throughput(reports: Reports) -> Rows:
    """Output tokens a second by batch size, and what they are of plain decoding in the same run."""
    sizes = sorted({point["batch_size"] for one in reports.values() for point in _points(one)})
    rows: Rows = []

    def add(label: str, figure: str, values: dict[int, float | None]) -> None:
        if any(value is not None for value in values.values()):
            by_size = {f"batch {size}": values.get(size) for size in sizes}
            rows.append({"run": label, "figure": figure, **by_size})

    for label, one in reports.items():
        plain = next((s for s in one["settings"] if s["name"] == PLAIN), None)
        for setting in one["settings"]:
            points = {point["batch_size"]: point for point in setting["points"]}
            name = f"{label}: {setting['name']}" if len(one["settings"]) > 1 else label
            add(name, "tok/s", {size: float(point["rate"]) for size, point in points.items()})
            limits = {size: point["fraction_of_limit"] for size, point in points.items()}
            add(name, "of the card's limit", limits)
            if plain is None or setting is plain:
                continue
            ratios = {size: point["ratio_to_plain"] for size, point in points.items()}
            add(name, "of plain decoding, best of each", ratios)
            usual = {point["batch_size"]: median(point["rates"]) for point in plain["points"]}
            of_medians = {
                size: median(point["rates"]) / usual[size]
                for size, point in points.items()
                if size in usual
            }
            add(name, "of plain decoding, medians", of_medians)
    return rows


def _points(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [point for setting in record["settings"] for point in setting["points"]]


def startup(reports: Reports) -> Rows:
    """Seconds of a throughput report's start-up, by phase, of the first setting."""
    starts = {label: one["settings"][0]["startup"] for label, one in reports.items()}
    phases = dict.fromkeys(phase for one in starts.values() for phase in one["phases"])
    rounds = {
        label: one["settings"][0]["graphs"].get("round", {}).get("captures")
        for label, one in reports.items()
    }
    return [
        {
            "run": label,
            "from the process's start, s": one["process"],
            "engine, s": one["total"],
            **{f"{phase}, s": one["phases"].get(phase) for phase in phases},
            "graphs of rounds": rounds[label],
        }
        for label, one in starts.items()
    ]


def step(reports: Reports) -> Rows:
    """Microseconds of a round by part of what the device does, and its kernels."""
    points = [(label, point) for label, one in reports.items() for point in one["points"]]
    parts = dict.fromkeys(part["name"] for _, point in points for part in point["parts"])
    rows = []
    for label, point in points:
        took = {part["name"]: _micro(part["seconds"]) for part in point["parts"]}
        rows.append(
            {
                "round": label,
                "batch": point["batch_size"],
                "a round": _micro(point["seconds"]),
                "kernels": sum(part["kernels"] or 0 for part in point["parts"]),
                "the card's limit": _micro(point["least"]),
                **{name: took.get(name) for name in parts},
            }
        )
    return rows


def step_host(reports: Reports) -> Rows:
    """Microseconds of a round that the CPU takes, and calls of the driver."""
    points = [(label, point) for label, one in reports.items() for point in one["points"]]
    parts = dict.fromkeys(name for _, point in points for name in point["host"] or {})
    calls = ("cudaGraphLaunch", "cudaEventSynchronize", "cudaLaunchKernel", "cudaMemcpyAsync")
    return [
        {
            "round": label,
            "batch": point["batch_size"],
            **{name: _micro((point["host"] or {}).get(name)) for name in parts},
            **{call: (point["calls"] or {}).get(call) for call in calls},
        }
        for label, point in points
    ]


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def serve(reports: Reports) -> Rows:
    """Rates, and percentiles of latencies in milliseconds, by load."""
    return [
        {
            "server": label,
            "load": point["name"],
            "tokens in": one["requests"]["prompt_len"],
            "out": one["requests"]["output_len"],
            "output tok/s": point["output_rate"],
            "prompt tok/s": point["prompt_rate"],
            **_percentiles("TTFT", point["latencies"]["ttft"]),
            **_percentiles("TPOT", point["latencies"]["tpot"]),
            "accepted length": point["tau"],
        }
        for label, one in reports.items()
        for point in one["points"]
    ]


def _percentiles(title: str, latency: dict[str, Any]) -> dict[str, float | None]:
    return {f"{title} p{one}, ms": latency["percentiles"][one] for one in ("50", "99")}


def first_token(reports: Reports) -> Rows:
    """Milliseconds to the first token by the prompt's length, of a peer."""
    return [
        {"run": label, "engine": one["engine"], **one["first_token"]}
        for label, one in reports.items()
    ]


def experts(reports: Reports) -> Rows:
    """Experts that a decoding step reads, and the tokens a second that reading them allows."""
    return [
        {
            "run": label,
            "batch": point["batch_size"],
            "experts a layer": point["experts"],
            "read by a step": point["read"],
            "if chosen evenly": point["even"],
            "GB a step": point["bytes"] / 1e9,
            "tok/s at a copy's speed": point["limit"],
        }
        for label, one in reports.items()
        for point in one["experts"]
    ]


def accept(reports: Reports) -> Rows:
    """Accepted length (tokens a round, bonus token included) by prompt set, 95% intervals."""
    rows: Rows = []
    for label, one in reports.items():
        for setting in one["settings"]:
            for run in setting["runs"]:
                summary = run["summary"]
                sets = {part["label"]: _interval(part["tau"]) for part in summary["by_set"]}
                rows.append(
                    {
                        "run": label,
                        "setting": setting["name"],
                        "temperature": run["temperature"],
                        **(sets if len(sets) > 1 else {}),
                        "all": _interval(summary["overall"]["tau"]),
                        "first token accepted": _interval(summary["overall"]["first"], 100),
                        "rounds": summary["overall"]["rounds"],
                        "same answers": f"{run['same_answers']} of {run['answers']}",
                    }
                )
    return rows


def _interval(value: dict[str, Any], scale: float = 1.0) -> str:
    digits, unit = (2, "") if scale == 1 else (1, "%")
    middle = f"{value['value'] * scale:.{digits}f}{unit}"
    if value["low"] is None:
        return middle
    return f"{middle} [{value['low'] * scale:.{digits}f}, {value['high'] * scale:.{digits}f}]"


KINDS: dict[str, Callable[[Reports], Rows]] = {
    "accept": accept,
    "experts": experts,
    "first-token": first_token,
    "serve": serve,
    "startup": startup,
    "step": step,
    "step-host": step_host,
    "throughput": throughput,
}
