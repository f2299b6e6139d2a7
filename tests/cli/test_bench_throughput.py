"""The command `specengine bench throughput`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from specengine.cli.bench.throughput import plan_of
from specengine.cli.main import build_parser, main
from specengine.lab.throughput.workload import SWEEP


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "throughput", *argv])


def test_a_plan() -> None:
    plan = plan_of(parse("smollm2-shape", "--load-format", "dummy", "--bandwidth", "4270"))
    assert plan.workload.batch_sizes == (1, 8, 64)
    assert (plan.workload.prompt_len, plan.workload.new_tokens, plan.workload.repeats) == (
        30,
        256,
        3,
    )
    assert plan.copy == 4.27e12
    sweep = plan_of(parse("--sweep", "--compare-plain", "--random-draft", "16384"))
    assert sweep.workload.batch_sizes == SWEEP
    assert sweep.random_draft == 16384
    assert sweep.compare_plain
    assert sweep.workload.params.temperature == 0.0
    sampled = plan_of(parse("--temperature", "0.7"))
    assert sampled.workload.params.temperature == 0.7


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-sizes", "0"], "--batch-sizes 0: must be at least 1"),
        (["--sweep", "--batch-sizes", "2"], "--sweep or --batch-sizes"),
        (["--new-tokens", "1"], "no round is left"),
        (["--bandwidth", "0"], "--bandwidth 0: must be above 0"),
        (["--compare-plain"], "nothing to compare"),
        (["--temperature", "-1"], "--temperature -1: must not be negative"),
    ],
)
def test_bad_usage(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "smollm2-shape", *argv]) == 2
    assert message in capsys.readouterr().err


def test_from_command_to_table(
    small_models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    command = [
        *["bench", "throughput", str(small_models["llama"]), "--device", "cpu", "--repeats", "1"],
        *["--batch-sizes", "2", "--prompt-len", "6", "--new-tokens", "8", "--prompt-period", "2"],
        *["--speculative-algorithm", "NGRAM", "--json", str(result), "--log-level", "error"],
    ]
    assert main(command) == 0
    assert "Output tokens a second" in capsys.readouterr().out
    [setting] = json.loads(result.read_text())["settings"]
    assert setting["name"] == "NGRAM"
    assert [point["batch_size"] for point in setting["points"]] == [2]
