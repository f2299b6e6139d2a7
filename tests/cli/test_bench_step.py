"""The command `specengine bench step`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specengine.cli.main import main


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-sizes", "0"], "--batch-sizes 0: must be at least 1"),
        (["--new-tokens", "2"], "no round would follow another"),
        (["--bandwidth", "-1"], "--bandwidth -1: must be above 0"),
    ],
)
def test_bad_usage(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "smollm2-shape", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="names the parts of the host's clock")
def test_from_command_to_table(
    small_models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    command = [
        *["bench", "step", str(small_models["llama"]), "--device", "cpu", "--new-tokens", "8"],
        *["--speculative-algorithm", "NGRAM", "--json", str(result), "--log-level", "error"],
        *["--bandwidth", "20", "--nodes", "--temperature", "0.8"],
    ]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "Where a round's time goes: llama" in shown
    assert "copy 0.02 TB/s (given)" in shown
    written = json.loads(result.read_text())
    assert written["points"][0]["batch_size"] == 1
    assert written["workload"]["temperature"] == 0.8
