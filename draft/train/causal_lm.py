"""Training whole models: targets from nothing, and standalone drafters that imitate a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from specengine.core.options import option
from specengine.draft.train.config import TrainSection
from specengine.draft.train.data.packing import PackedBatch
from specengine.draft.train.llama import Llama
from specengine.draft.train.model_directory import save_model
from specengine.draft.train.task import Sums, TaskLoss
from specengine.draft.train.teacher import Teacher

MAX_ELEMENTS = 1 << 26  # of logits that are there at once


@dataclass(frozen=True, kw_only=True)
class ModelShape(TrainSection):
    section: ClassVar[str] = "task"

    init: str | None = option(None, "directory of a model whose weights and shape to begin with")
    hidden_size: int = option(256, "width of the residual stream")
    intermediate_size: int = option(688, "width inside the feed-forward layers")
    num_layers: int = option(6, "decoder layers")
    num_heads: int = option(4, "heads of queries")
    num_kv_heads: int = option(2, "heads of keys and values")
    max_positions: int = option(2048, "longest text")
    rope_theta: float = option(10000.0, "base of the rotary frequencies")
    tie_embeddings: bool = option(True, "let the head be the embedding")
    compiles: bool = option(False, "compile the layers; on a GPU, worth it from some minutes on")
    dtype: str = option("bfloat16", "of the exported weights", ("bfloat16", "float32"))

    def _check_ranges(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        self._at_least(1, *sizes, "max_positions", "rope_theta")
        per_head = self.hidden_size // self.num_heads
        fits = self.hidden_size % self.num_heads == 0 and per_head % 2 == 0
        self._require(fits, "num_heads", "must cut hidden_size into heads of equal, even width")
        self._require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", "divides num_heads")


@dataclass(frozen=True)
class Compared:
    """One block of rows, against what comes next."""

    logits: Tensor  # float32 [R, V]
    labels: Tensor  # int64 [R]
    teacher_logits: Tensor | None  # float32 [R, V]


class CausalLmTask:
    """Next-token prediction; with a teacher, its distribution counts for `teacher_weight` of the
    loss (Hinton et al. 2015, at temperature 1).

    learns: of a batch, bool [T]: the tokens whose prediction is learned.
    """

    def __init__(
        self,
        name: str,
        module: Llama,
        tokenizer: Any,
        dtype: torch.dtype,
        learns: Callable[[PackedBatch], Tensor],
        teacher: Teacher | None = None,
        teacher_weight: float = 0.0,
    ) -> None:
        self.name, self.module, self.tokenizer = name, module, tokenizer
        self.dtype, self.learns = dtype, learns
        self.teacher, self.teacher_weight = teacher, teacher_weight
        self.metrics = ["accuracy"] if teacher is None else ["accuracy", "acceptance_0"]

    def loss(self, batch: PackedBatch) -> TaskLoss:
        sums, count = self._sums(batch)
        metrics = {name: sums[name].detach() for name in self.metrics}
        mean = sums["loss"] / count.clamp_min(1.0)
        return TaskLoss(mean, count, metrics, dict.fromkeys(self.metrics, count))

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> Sums:
        sums, count = self._sums(batch)
        return sums | {"count": count}

    def summary(self, sums: Sums) -> dict[str, float]:
        """accuracy: of the best token against the next one; acceptance_0: against the teacher's
        best, which is what greedy verification accepts."""
        count = max(float(sums["count"]), 1.0)
        return {name: float(sums[name]) / count for name in ("loss", *self.metrics)}

    def export(self, directory: Path) -> None:
        save_model(directory, self.module, self.tokenizer, self.dtype)

    def _sums(self, batch: PackedBatch) -> tuple[Sums, Tensor]:
        """Over the rows that are learned: loss and metrics, and how many rows there are."""
        rows = self._rows(batch)
        labels = batch.input_ids[rows + 1]
        taught = None if self.teacher is None else self.teacher.forward(batch).hidden[rows]

        def judge(hidden: Tensor, head: Tensor) -> Tensor:
            return self._judge(hidden[rows], head, labels, taught)

        sums = self.module(batch.input_ids, batch.positions, batch.lens, judge)
        count = torch.tensor(float(len(rows)), device=rows.device)
        return dict(zip(["loss", *self.metrics], sums.unbind(), strict=True)), count

    def _rows(self, batch: PackedBatch) -> Tensor:
        """int64 [R], those whose next token is of the same document, and learned."""
        follows = batch.document_ids[1:] == batch.document_ids[:-1]
        return torch.nonzero(follows & self.learns(batch)[1:])[:, 0]

    def _judge(self, hidden: Tensor, head: Tensor, labels: Tensor, taught: Tensor | None) -> Tensor:
        """Sums [1 + metrics], block by block: logits of all rows are never in memory together."""
        size = max(1, MAX_ELEMENTS // head.shape[0])
        total = torch.zeros(1 + len(self.metrics), device=hidden.device)
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            block = None if taught is None else taught[part]
            total = total + checkpoint(
                self._judge_block, hidden[part], head, labels[part], block, use_reentrant=False
            )
        return total

    def _judge_block(
        self, hidden: Tensor, head: Tensor, labels: Tensor, taught: Tensor | None
    ) -> Tensor:
        teacher_logits = None
        if taught is not None and self.teacher is not None:
            teacher_logits = self.teacher.logits(taught)
        compared = Compared(F.linear(hidden, head).float(), labels, teacher_logits)
        best = compared.logits.argmax(-1)
        found = [self._block_loss(compared), (best == labels).sum()]
        if teacher_logits is not None:
            found.append((best == teacher_logits.argmax(-1)).sum())
        return torch.stack([one.float() for one in found])

    def _block_loss(self, compared: Compared) -> Tensor:
        loss = F.cross_entropy(compared.logits, compared.labels, reduction="sum")
        if compared.teacher_logits is None:
            return loss
        log_probs = compared.logits.log_softmax(-1)
        imitation = -(compared.teacher_logits.softmax(-1) * log_probs).sum()
        return self.teacher_weight * imitation + (1.0 - self.teacher_weight) * loss


def learns_all(batch: PackedBatch) -> Tensor:
    """Every token of the conversation."""
    return torch.ones_like(batch.loss_mask)


def learns_answers(batch: PackedBatch) -> Tensor:
    """The assistant's words alone."""
    return batch.loss_mask
