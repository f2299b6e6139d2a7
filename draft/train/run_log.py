"""The curves of a run: log.jsonl always, TensorBoard where it is installed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specengine.draft.train.checkpoint import writing_to

logger = logging.getLogger(__name__)

LOG_FILE = "log.jsonl"


class RunLog:
    """Lines `{"step", "kind", ...numbers}`; kind is train, held_out or probe."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """first_step: where the run goes on; lines past it, of a session that was lost, go."""
        self.path = directory / LOG_FILE
        with writing_to(self.path):
            lines = [line for line in _lines(self.path) if _step(line) <= first_step]
            self.path.write_text("".join(lines), encoding="utf-8")
            self.file = self.path.open("a", encoding="utf-8", buffering=1)
        self.board = _tensorboard(directory, first_step)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        with writing_to(self.path):
            self.file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            if self.board is not None:
                for name, value in values.items():
                    self.board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []


def _step(line: str) -> float:
    """The step of a line; past everything where the process was killed amid writing it."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return float("inf")


def _tensorboard(directory: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.info(
            "TensorBoard is not installed (the extra `train` brings it); curves are in %s",
            directory / LOG_FILE,
        )
        return None
    writer: Any = SummaryWriter
    return writer(str(directory / "tensorboard"), purge_step=first_step + 1)
