"""A run by two processes: what each of them does, and the program of the second."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.processes import start_processes
from tests.train.training_runs import BigramTask, bigram_config, run_bigram

SETTINGS = ["optimiser.accumulate=2", "run.log_every=1", "schedule.max_steps=6"]


class CalmTask(BigramTask):
    """Without noise: each process draws its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module.eval()
        self.module.train = lambda mode=True: self.module  # type: ignore[method-assign]


def run_twice(data: Path, output: Path) -> None:
    """To the end; then from the checkpoint in the middle, as if the rest had not been."""
    processes = start_processes("cpu")
    dataset = TokenDataset(data)
    for resume in ("false", "true"):
        torch.manual_seed(0)
        config = bigram_config(output, *SETTINGS, f"run.resume={resume}")
        run_bigram(config, dataset, CalmTask(), processes)
        if resume == "false" and processes.is_first:
            (output / "checkpoints" / "step-00000006.pt").unlink()
        processes.wait()
    processes.close()


if __name__ == "__main__":
    run_twice(Path(sys.argv[1]), Path(sys.argv[2]))
