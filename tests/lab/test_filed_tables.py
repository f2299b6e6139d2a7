"""benchmarks/: reports of `specengine bench` as tables of benchmarks/results."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specengine.lab.card import Card
from specengine.lab.step.report import Part, Step
from specengine.lab.step.report import Report as StepReport
from specengine.lab.throughput.report import PLAIN, Point, Report, Setting, Startup
from specengine.lab.throughput.workload import Workload

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FACTS: dict[str, Any] = {
    **{"command": "specengine bench", "commit": "abc", "cpu": "some CPU", "cores": 2},
    **{
        "threads": 1,
        "gpu": None,
        "python": "3.11",
        "versions": {"torch": "2.11.0", "triton": None},
    },
}
CARD = Card("some GPU", "bfloat16", 4e12, 7e14)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("report")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    (tmp_path / "speed.json").write_text('{"title": "T", "summary": "S.", "tables": {}}')
    yield module
    for name in ("report", "bench_tables"):
        del sys.modules[name]


def throughput() -> dict[str, Any]:
    drafted = Setting("EAGLE3", {}, Startup(4.0, {"load": 3.0}, 9.0))
    drafted.points += [Point(1, (300.0, 400.0), limit=1600.0), Point(8, (5000.4,))]
    drafted.graphs = {"round": {"captures": 2}}
    plain = Setting(PLAIN, {}, points=[Point(1, (200.0, 100.0)), Point(8, (2500.2,))])
    model = {"name": "tiny"}
    made = Report("2026-11-21", FACTS, "some", model, Workload((1, 8)), [drafted, plain], CARD)
    parsed: dict[str, Any] = json.loads(made.to_json())
    return parsed


def step() -> dict[str, Any]:
    parts = [Part("draft", 3e-5, kernels=4), Part("verify", 1e-4, kernels=2, least=5e-5)]
    host, calls = {"launch": 9e-6}, {"cudaGraphLaunch": 1.0}
    one = Step(1, True, 3.0, 100.0, 12, 1.4e-4, parts, host=host, calls=calls)
    model = {"name": "tiny"}
    made = StepReport("2026-11-21", FACTS, model, {}, Workload(), CARD, "by hand", [one])
    parsed: dict[str, Any] = json.loads(made.to_json())
    return parsed


def test_a_throughput_report_becomes_rates_and_ratios(report: Any) -> None:
    rows = report.bench_tables.read({"135M": throughput()})
    found = {(row["run"], row["figure"]): (row["batch 1"], row["batch 8"]) for row in rows}
    assert found == {
        ("135M: EAGLE3", "tok/s"): (400.0, 5000.4),
        ("135M: EAGLE3", "of the card's limit"): (0.25, None),
        ("135M: EAGLE3", "of plain decoding, best of each"): (2.0, 2.0),
        ("135M: EAGLE3", "of plain decoding, medians"): (350 / 150, 2.0),
        ("135M: no speculation", "tok/s"): (200.0, 2500.2),
    }
    [start] = report.bench_tables.read({"135M": throughput()}, "startup")
    assert (start["engine, s"], start["load, s"], start["graphs of rounds"]) == (4.0, 3.0, 2)


def test_a_step_report_becomes_microseconds(report: Any) -> None:
    [row] = report.bench_tables.read({"a chain": step()})
    assert (row["kernels"], row["draft"], row["verify"]) == (6, pytest.approx(30), 100)
    [host] = report.bench_tables.read({"a chain": step()}, "step-host")
    assert (host["launch"], host["cudaGraphLaunch"]) == (pytest.approx(9), 1.0)


def test_an_accept_report_becomes_intervals(report: Any) -> None:
    tau = {"value": 2.5, "low": 2.25, "high": 2.75}
    first = {"value": 0.5, "low": None, "high": None}
    by_set = [{"label": "talk", "tau": tau}]
    summary = {"overall": {"tau": tau, "first": first, "rounds": 9}, "by_set": by_set}
    run = {"temperature": 0.0, "answers": 3, "same_answers": 2, "summary": summary}
    settings = [{"name": "chain", "runs": [run]}]
    [row] = report.bench_tables.read({"tiny": {"settings": settings, "environment": FACTS}})
    assert (row["all"], row["first token accepted"]) == ("2.50 [2.25, 2.75]", "50.0%")
    assert row["same answers"] == "2 of 3"


def test_a_serving_report_becomes_rates_and_percentiles(report: Any) -> None:
    ttft, tpot = ({"percentiles": {"50": one, "99": 2 * one}} for one in (30.0, 2.5))
    rates = {"output_rate": 500.0, "prompt_rate": 2000.0, "tau": 2.5}
    point = {"name": "8 streams", "latencies": {"ttft": ttft, "tpot": tpot}, **rates}
    requests = {"prompt_len": 1024, "output_len": 256}
    [row] = report.bench_tables.read({"ours": {"requests": requests, "points": [point]}})
    assert [*row.values()] == ["ours", "8 streams", 1024, 256, 500, 2000, 30, 60, 2.5, 5, 2.5]
    assert row["TTFT p99, ms"] == 60


def test_a_peers_first_tokens_become_a_row_a_run(report: Any) -> None:
    one = {"engine": "vLLM 9", "first_token": {"32": 7.5, "2048": 60.0}}
    [row] = report.bench_tables.read({"8B": one})
    assert row == {"run": "8B", "engine": "vLLM 9", "32": 7.5, "2048": 60.0}


def test_an_experts_report_becomes_a_row_a_batch_size(report: Any) -> None:
    figures = {"read": 125.5, "even": 126.0, "bytes": 6e10, "limit": 4100.0}
    point = {"batch_size": 64, "experts": 128, **figures}
    [row] = report.bench_tables.read({"30B": {"experts": [point], "environment": FACTS}})
    assert [*row.values()] == ["30B", 64, 128, 125.5, 126.0, 60.0, 4100.0]


def test_a_replaced_table_changes_page_and_index_alone(report: Any, tmp_path: Path) -> None:
    report.write("speed", "kept", "Kept", [{"n": 1}], "First.\n\nSecond\nline.", FACTS)
    for rate in (1.23456, 12345.6):
        report.write("speed", "rates", "Rates", [{"what": "a", "tok/s": rate, "ok": True}])
    page, index = ((tmp_path / name).read_text() for name in ("speed.md", "README.md"))
    assert "| a | 12,346 | yes |" in page
    assert "1.235" not in page
    assert "\n\nFirst.\n\nSecond line.\n" in page
    assert "commit abc, some CPU (2 cores, 1 threads), Python 3.11, torch 2.11.0." in page
    assert "`kept`, `rates`" in index
    assert report.pages() == {tmp_path / "speed.md": page, tmp_path / "README.md": index}


def test_a_topic_has_to_be_there(report: Any) -> None:
    with pytest.raises(SystemExit, match="title and summary"):
        report.write("unknown", "rates", "Rates", [])
