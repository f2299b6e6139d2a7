"""The curves of a run, in its file and in TensorBoard."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from specengine.draft.train.run_log import RunLog


@dataclass
class Board:
    """Takes the place of TensorBoard's writer, which the tests do without."""

    made: ClassVar[list[Board]] = []
    directory: str
    purge_step: int
    scalars: list[tuple[str, float, int]] = field(default_factory=list)
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.is_closed = True


def put_tensorboard(monkeypatch: pytest.MonkeyPatch, writer: Any) -> None:
    module: Any = ModuleType("torch.utils.tensorboard")
    if writer is not None:
        module.SummaryWriter = writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)


def test_every_number_becomes_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tensorboard(monkeypatch, Board)
    log = RunLog(tmp_path, 0)
    log.write(10, "train", {"loss": 3.5, "lr": 0.1})
    log.write(20, "probe", {"accepted_length": 2.5})
    log.close()
    again = RunLog(tmp_path, 10)
    again.write(20, "probe", {"accepted_length": 2.75})
    again.close()
    first, second = Board.made
    assert first.scalars == [
        ("train/loss", 3.5, 10),
        ("train/lr", 0.1, 10),
        ("probe/accepted_length", 2.5, 20),
    ]
    assert (first.purge_step, second.purge_step) == (1, 11), "curves past the checkpoint go"
    assert first.directory == second.directory == str(tmp_path / "tensorboard")
    assert first.is_closed
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 10, "kind": "train", "loss": 3.5, "lr": 0.1},
        {"step": 20, "kind": "probe", "accepted_length": 2.75},
    ]


def test_without_tensorboard_the_file_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_tensorboard(monkeypatch, None)
    with caplog.at_level("INFO", "specengine"):
        log = RunLog(tmp_path, 0)
    log.write(1, "train", {"loss": 1.0})
    log.close()
    assert "the extra `train` brings it" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
