"""Runs of a task that takes milliseconds, for tests of the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from specengine.draft.train.config import TrainConfig, TrainSection, load_config
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.packing import PackedBatch
from specengine.draft.train.loop import Outcome, Probe, Trainer
from specengine.draft.train.processes import Processes
from specengine.draft.train.task import Sums, TaskLoss
from tests.train.data_sets import TARGET, random_dataset

ONE = Processes(0, 1, torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class BigramConfig(TrainSection):
    section: ClassVar[str] = "task"


class Bigram(nn.Module):
    """A token out of the one before, noise on top: what it learns follows the random stream."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TARGET.vocab_size, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16)])
        self.head = nn.Linear(16, TARGET.vocab_size)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(F.dropout(hidden, 0.1, self.training))
        out: torch.Tensor = self.head(hidden)
        return out


class BigramTask:
    name = "bigram"

    def __init__(self, poison: Callable[[], float] = lambda: 1.0) -> None:
        """poison: what each training loss is multiplied by."""
        self.module = Bigram()
        self.poison = poison

    def loss(self, batch: PackedBatch) -> TaskLoss:
        logits = self.module(batch.input_ids[:-1])
        labels = batch.input_ids[1:]
        count = torch.tensor(float(len(labels)))
        hits = (logits.argmax(-1) == labels).sum()
        loss = F.cross_entropy(logits, labels)
        loss = loss * self.poison() if self.module.training else loss
        return TaskLoss(loss, count, {"accuracy": hits}, {"accuracy": count})

    def evaluate(self, batch: PackedBatch) -> Sums:
        out = self.loss(batch)
        return {"loss": out.loss * out.count, "count": out.count}

    def summary(self, sums: Sums) -> dict[str, float]:
        return {"loss": float(sums["loss"] / sums["count"])}

    def export(self, directory: Path) -> None:
        weights = {name: one.detach() for name, one in self.module.named_parameters()}
        torch.save(weights, directory / "weights.pt")


def bigram_data(directory: Path) -> TokenDataset:
    return random_dataset(directory, [20, 30, 25, 15] * 20)


def bigram_config(output: Path, *overrides: str) -> TrainConfig:
    base = [
        f"run.output={output}",
        "run.device=cpu",
        "data.batch_tokens=128",
        "data.held_out=0.2",
        "optimiser.lr=0.01",
        "schedule.max_steps=12",
        "schedule.warmup_steps=3",
        "run.eval_every=4",
        "run.save_every=4",
        "run.log_every=2",
    ]
    return load_config(BigramConfig, None, [*base, *overrides])


def run_bigram(
    config: TrainConfig,
    dataset: TokenDataset,
    task: BigramTask | None = None,
    processes: Processes = ONE,
    **more: Probe,
) -> Outcome:
    """Seeded as specengine.lab.training does it; more: `probe`."""
    torch.manual_seed(config.run.seed)
    return Trainer(task or BigramTask(), dataset, config, processes, **more).run()
