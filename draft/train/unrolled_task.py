"""What the tasks of one-layer drafters share: a teacher, an unrolled forward, a loss, a verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from specengine.core.options import option
from specengine.draft.train.acceptance import Judged, WalkCounts, accepted_length, walk
from specengine.draft.train.attention import FlexAttention, PaddedAttention, TttAttention
from specengine.draft.train.config import TrainSection
from specengine.draft.train.data.packing import PackedBatch
from specengine.draft.train.documents import DraftRows
from specengine.draft.train.head import HeadLoss, TargetBlock, TargetBlocks
from specengine.draft.train.losses import LOSSES, Mixture
from specengine.draft.train.task import Sums, TaskLoss
from specengine.draft.train.teacher import Teacher
from specengine.draft.train.unroll import UnrolledDraft

# Compiled code is made anew for every number of rows; so batches are padded to the largest so far,
# in steps that documents seldom exceed.
_ROWS_STEP = 2048


@dataclass(frozen=True, kw_only=True)
class UnrollConfig(TrainSection):
    section: ClassVar[str] = "task"

    num_steps: int = option(7, "steps of training-time test: how deep the drafter runs on itself")
    step_decay: float = option(0.8, "weight of each step's loss, relative to the step before")
    soft_cross_entropy: float = option(1.0, "weight of the loss against the target's distribution")
    hard_cross_entropy: float = option(0.0, "weight of the loss against the target's best token")
    total_variation: float = option(0.0, "weight of 1 - acceptance of a sampled draft")
    log_acceptance: float = option(0.0, "weight of minus the logarithm of that acceptance")
    chain_steps: int = option(5, "tokens a round in evaluation; num_steps at most")
    attention: str = option(
        "auto", "flex is compiled, for GPUs; padded is plain PyTorch", ("auto", "flex", "padded")
    )
    compiles: bool | None = option(None, "compile layer and loss; default: on a GPU")
    feature_cache_mb: int = option(
        0, "MiB, where the target is, for its outputs on documents that come again; 0: run it anew"
    )

    def _check_ranges(self) -> None:
        self._at_least(1, "num_steps", "chain_steps")
        self._at_least(0, *LOSSES, "feature_cache_mb")
        self._require(0 < self.step_decay <= 1, "step_decay", "must lie above 0, and be at most 1")
        self._require(any(self.loss_weights.values()), "soft_cross_entropy", "some loss must weigh")

    @property
    def loss_weights(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in LOSSES}

    @property
    def step_weights(self) -> list[float]:
        return [self.step_decay**step for step in range(self.num_steps)]

    def compiles_on(self, device: torch.device) -> bool:
        return device.type == "cuda" if self.compiles is None else self.compiles


class UnrolledTask(ABC):
    """A draft.train.task.TrainTask. target_ids: int64 [Vd] on the device, the draft vocabulary;
    None is the target's."""

    name: str

    def __init__(
        self,
        module: UnrolledDraft,
        teacher: Teacher,
        config: UnrollConfig,
        target_ids: Tensor | None = None,
    ) -> None:
        self.module = module
        self.teacher = teacher
        self.config = config
        self.target_ids = target_ids
        self.num_rows = 0  # of a padded batch
        self.compiles = config.compiles_on(teacher.device)
        on_gpu = teacher.device.type == "cuda"
        self.is_flex = config.attention == "flex" or (config.attention == "auto" and on_gpu)
        mixture = Mixture(config.loss_weights)
        self.head_loss = HeadLoss(mixture, config.step_weights, self.compiles)

    @abstractmethod
    def export(self, directory: Path) -> None: ...

    def loss(self, batch: PackedBatch) -> TaskLoss:
        rows = self.draft_rows(batch)
        blocks = TargetBlocks(self.teacher, rows, self.target_ids, self.compiles)
        total, sums = self.module(
            rows,
            self.attention(rows),
            self.config.num_steps,
            lambda states, head: self.head_loss(blocks, states, head),
        )
        count = sums.compared[0]
        mean = total / (count.clamp_min(1.0) * sum(self.config.step_weights))
        names = [f"match_{step}" for step in range(self.config.num_steps)]
        metrics = dict(zip(names, sums.matches.unbind(), strict=True))
        counts = dict(zip(names, sums.drafted.unbind(), strict=True))
        return TaskLoss(mean, count, metrics, counts)

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> Sums:
        rows = self.draft_rows(batch)
        blocks = TargetBlocks(self.teacher, rows, self.target_ids, is_padded=False)
        steps = max(self.config.num_steps, self.config.chain_steps)
        judge = _Judge(rows, blocks, self.head_loss)
        judged, sums = self.module(rows, self.attention(rows), steps, judge)
        counts = walk(judged, self.config.chain_steps)
        return {**sums, **_as_sums(counts, rows.input_ids.device)}

    def summary(self, sums: Sums) -> dict[str, float]:
        """loss, in nats a position; acceptance_k, the share of drafted tokens at position k that
        are accepted, where all before them were; missed_k, the share rejected for want of the
        token in the draft vocabulary; and the accepted length of a chain, bonus token included."""
        values = {name: float(value) for name, value in sums.items()}
        steps = range(self.config.chain_steps)
        drafted = [max(values[f"drafted_{step}"], 1.0) for step in steps]
        rates = [values[f"accepted_{step}"] / drafted[step] for step in steps]
        missed = [values[f"missed_{step}"] / drafted[step] for step in steps]
        return {
            "loss": values["loss"] / max(values["compared"], 1.0),
            "accepted_length": accepted_length(rates),
            **{f"acceptance_{step}": rate for step, rate in enumerate(rates)},
            **{f"missed_{step}": rate for step, rate in enumerate(missed)},
        }

    def draft_rows(self, batch: PackedBatch) -> DraftRows:
        output = self.teacher.forward(batch)
        if not (self.is_flex or self.compiles):
            return DraftRows.of(batch, output.features, output.hidden)
        needed = -(-batch.num_tokens // _ROWS_STEP) * _ROWS_STEP
        self.num_rows = max(self.num_rows, needed)
        return DraftRows.of(batch, output.features, output.hidden, self.num_rows)

    def attention(self, rows: DraftRows) -> TttAttention:
        return FlexAttention(rows) if self.is_flex else PaddedAttention(rows)


class _Judge:
    """Reads off what the drafter would draft at every row."""

    def __init__(self, rows: DraftRows, blocks: TargetBlocks, loss: HeadLoss) -> None:
        self.rows = rows
        self.blocks = blocks
        self.loss = loss

    def __call__(self, states: list[Tensor], head: Tensor) -> tuple[Judged, Sums]:
        shape = (len(states), self.rows.num_rows)
        device = head.device
        self.matches, self.missed = torch.zeros(2, *shape, dtype=torch.bool, device=device)
        self.greedy = torch.zeros(shape[1], dtype=torch.bool, device=device)
        self.sums = torch.zeros(2, device=device)
        for block in self.blocks:
            self.greedy[block.rows] = self.rows.tokens_at(0)[block.rows] == block.best
            for step, state in enumerate(states):
                self._judge_step(block, step, state, head)
        judged = Judged(
            matches=self.matches.cpu().numpy(),
            missed=self.missed.cpu().numpy(),
            greedy=self.greedy.cpu().numpy(),
            answers=self._answers().cpu().numpy(),
            lens=self.rows.lens,
        )
        return judged, dict(zip(("loss", "compared"), self.sums.unbind(), strict=True))

    def _judge_step(self, block: TargetBlock, step: int, state: Tensor, head: Tensor) -> None:
        drafted = block.drafted(step)
        rows = block.draft_rows(step)
        logits = state[rows] @ head.to(state.dtype).T
        best = logits.argmax(-1)
        if self.blocks.target_ids is not None:
            best = self.blocks.target_ids[best]
        self.matches[step, rows[drafted]] = (best == block.best)[drafted]
        self.missed[step, rows[drafted]] = ~block.known[drafted]
        weights = self.loss.step_weights
        if step < len(weights):
            losses = self.loss.mixture(logits, block.log_probs, block.draft_best)
            losses = losses[drafted & block.known]
            self.sums[0] += losses.sum() * weights[step] / sum(weights)
            self.sums[1] += len(losses) if step == 0 else 0

    def _answers(self) -> Tensor:
        """bool [R], tokens that the target generated; the first of a document is none."""
        return self.rows.learns.roll(1)


def _as_sums(counts: WalkCounts, device: torch.device) -> Sums:
    table = np.stack([counts.drafted, counts.accepted, counts.missed])
    sums = torch.from_numpy(table).to(device, torch.float64)
    return {
        f"{kind}_{step}": sums[row, step]
        for row, kind in enumerate(("drafted", "accepted", "missed"))
        for step in range(counts.num_steps)
    }
