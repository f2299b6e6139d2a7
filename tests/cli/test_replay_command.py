"""The command `replay`, on a trace written by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from specengine.cli.main import main
from specengine.core.config import SpecConfig
from specengine.draft.trace.format import NODE, RECORD, TOKEN, RoundColumns
from specengine.draft.trace.writer import TraceWriter

COSTS = {"verify": {"1": 2.0, "3": 3.0}, "draft_step": {"1": 0.5}, "round": 0.25}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests of four tokens after the first, chains of two that are right about the first."""
    path = tmp_path / "trace"
    spec = SpecConfig(algorithm="EAGLE3", num_steps=2, num_draft_tokens=3)
    header = {
        "mode": "positions",
        "is_sampled": False,
        "model": "tiny",
        "vocab_size": 16,
        "algorithm": "EAGLE3",
        "verifier": "match",
        "draft_vocab_size": 16,
        "spec": asdict(spec),
    }
    writer = TraceWriter(path, header, 1 << 20)
    for request in range(2):
        writer.add_request({"rid": str(request), "is_greedy": True})
        for position in range(1, 5):
            limit = 5 - position  # tokens that it may still have
            nodes = [(position, 0, 0.9, np.nan), (15, 1, 0.1, np.nan)][: limit - 1]
            writer.add_round(
                RoundColumns(
                    np.array([(request, position, limit, 1 + len(nodes), 1, 0)], RECORD),
                    np.array(nodes, NODE),
                    np.array([position], TOKEN),
                )
            )
        writer.add_end(request, 5)
    writer.close()
    return path


def test_numbers_are_those_of_the_walk(trace: Path, tmp_path: Path) -> None:
    """Each round stands on one draft and its bonus: two rounds of two tokens. The last of them has
    room for two nodes alone."""
    costs, out = tmp_path / "costs.json", tmp_path / "out.json"
    costs.write_text(json.dumps(COSTS))
    assert main(["replay", str(trace), "--cost-table", str(costs), "--json", str(out)]) == 0
    rows = {row["setting"]["num_steps"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {1, 2}
    for row in rows.values():
        assert row["tau"] == {"value": 2.0, "low": 2.0, "high": 2.0, "count": 4, "prompts": 2}
        assert row["is_exact"]
    assert rows[2]["nodes"] == 2.5
    # verify of 3 nodes and one more level, then of 2, between 1 and 3, and none
    assert rows[2]["speed"]["round_ms"] == pytest.approx(((3 + 0.5 + 0.25) + (2.5 + 0.25)) / 2)
    assert rows[1]["speed"]["round_ms"] == pytest.approx(2.5 + 0.25)
    assert rows[1]["speed"]["speedup"]["value"] == pytest.approx(2.0 * 2.0 / 2.75)
    assert [rows[1]["is_best"], rows[2]["is_best"]] == [True, False]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-steps", "3"], "recorded with 2"),
        (["--topk", "2"], "recorded with 1"),
        (["--verify", "block"], "cannot be known"),
        (["--vocab-sizes", "17"], "recorded with 16"),
        (["--num-draft-tokens", "9"], "no setting"),
        (["--cost-table", "missing.json"], "no table of step costs"),
    ],
)
def test_what_the_trace_cannot_tell_is_refused(
    trace: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), *flags]) in (1, 2)
    assert message in capsys.readouterr().err


def test_costs_are_not_guessed(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"verify": {"1": 2.0, "2": 2.5}}))
    assert main(["replay", str(trace), "--cost-table", str(costs)]) == 1
    assert "lies outside" in capsys.readouterr().err


def test_the_plot_is_drawn(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["replay", str(trace), "--plot", str(tmp_path / "pareto.png")]) == 0
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
