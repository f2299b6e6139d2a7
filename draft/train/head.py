"""The head and the loss, block by block: neither the target's logits nor the draft's are ever whole
in memory.

Blocks run over the rows t of the target that predict an answer token, because K draft rows are
compared with each: row t - k - 1 at step k. Each block's gradient is taken at once, so that nothing
of the size of the vocabulary waits for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from specengine.draft.train.documents import DraftRows
from specengine.draft.train.losses import Mixture
from specengine.draft.train.teacher import Teacher

_MAX_ELEMENTS = 2**29  # of [C, V], the target's logits in float32: 2 GiB
_MAX_ROWS = 8192


@dataclass(frozen=True)
class TargetBlock:
    """C rows of the target."""

    rows: Tensor  # int64 [C], t
    places: Tensor  # int64 [C], the position of each in its document
    best: Tensor  # int64 [C], the target's best next token
    is_row: Tensor  # bool [C], False for padding at the end
    known: Tensor  # bool [C], whether the draft vocabulary has the best token
    log_probs: Tensor  # [C, Vd], the target's on the draft vocabulary, in the target's dtype
    draft_best: Tensor  # int64 [C], the best token there

    def draft_rows(self, step: int) -> Tensor:
        """int64 [C]; 0 where there is none."""
        return (self.rows - step - 1).clamp_min(0)

    def drafted(self, step: int) -> Tensor:
        """bool [C], where there is a draft row."""
        return self.is_row & (self.places > step)


class TargetBlocks:
    """The target's side of a batch.

    target_ids: int64 [Vd], ascending, the draft vocabulary; None is the whole one. is_padded: give
    every block the same number of rows, for compiled code.
    """

    def __init__(
        self, teacher: Teacher, rows: DraftRows, target_ids: Tensor | None, is_padded: bool
    ) -> None:
        self.teacher = teacher
        self.rows = rows
        self.target_ids = target_ids
        self.is_padded = is_padded
        self.learns = rows.learns.nonzero()[:, 0]  # int64 [N], t
        self.size = min(_MAX_ROWS, max(1, _MAX_ELEMENTS // teacher.vocab_size))

    def __iter__(self) -> Iterator[TargetBlock]:
        for rows in torch.split(self.learns, self.size):
            yield self._block(rows)

    def _block(self, rows: Tensor) -> TargetBlock:
        count = len(rows)
        if self.is_padded:
            rows = torch.cat([rows, rows.new_zeros(self.size - count)])
        logits = self.teacher.logits(self.rows.hidden[rows])
        best = logits.argmax(-1)
        is_row = torch.arange(len(rows), device=rows.device) < count
        known = torch.ones_like(is_row)
        if self.target_ids is not None:
            logits = logits.index_select(1, self.target_ids)
            place = torch.searchsorted(self.target_ids, best).clamp_max(len(self.target_ids) - 1)
            known = self.target_ids[place] == best
        return TargetBlock(
            rows=rows,
            places=self.rows.positions[rows],
            best=best,
            is_row=is_row,
            known=known,
            log_probs=logits.log_softmax(-1).to(self.teacher.dtype),
            draft_best=logits.argmax(-1),
        )


@dataclass(frozen=True)
class StepSums:
    """Sums over the rows of each step, float32 [K]."""

    losses: Tensor
    matches: Tensor  # the draft's best token is the target's
    compared: Tensor  # rows that have a loss: those whose token is in the draft vocabulary
    drafted: Tensor  # all rows


class HeadLoss:
    """What the steps of an unrolled draft lose against the target. step_weights: of each step in
    the sum."""

    def __init__(self, mixture: Mixture, step_weights: list[float], compiles: bool) -> None:
        self.mixture = mixture
        self.step_weights = step_weights
        self.compare: Callable[..., Any] = (
            torch.compile(self._compare, dynamic=False) if compiles else self._compare
        )

    def __call__(
        self, blocks: TargetBlocks, states: list[Tensor], head: Tensor
    ) -> tuple[Tensor, StepSums]:
        """states: what the head reads at each step, [R, H]. -> the sum over steps and rows, each
        step with its weight, with a gradient; and the bare sums."""
        total, sums = _blockwise(self, blocks, head, *states)
        return total, StepSums(*sums)

    def _compare(
        self, states: Tensor, head: Tensor, target: Tensor, best: Tensor, compared: Tensor
    ) -> tuple[Tensor, Tensor]:
        """states [C, H], head [Vd, H] -> (sum of the losses of the compared rows; how many of them
        have the target's best token as theirs)."""
        logits = states @ head.T
        losses = self.mixture(logits, target, best)
        matches = (logits.argmax(-1) == best) & compared
        return torch.where(compared, losses, 0.0).sum(), matches.sum()


class _BlockwiseLoss(torch.autograd.Function):
    """The gradient is taken together with the value."""

    @staticmethod
    def forward(
        ctx: Any, loss: HeadLoss, blocks: TargetBlocks, head: Tensor, *states: Tensor
    ) -> tuple[Tensor, Tensor]:
        learns_head = ctx.needs_input_grad[2]
        weight = head.detach().to(states[0].dtype).requires_grad_(learns_head)
        head_gradient = torch.zeros_like(head)
        gradients = [torch.zeros_like(state) for state in states]
        sums = torch.zeros(4, len(states), device=head.device)
        for block in blocks:
            for step, step_weight in enumerate(loss.step_weights):
                rows, drafted = block.draft_rows(step), block.drafted(step)
                compared = drafted & block.known
                with torch.enable_grad():
                    read = states[step].detach()[rows].requires_grad_()
                    value, matches = loss.compare(
                        read, weight, block.log_probs, block.draft_best, compared
                    )
                    wanted = (read, weight) if learns_head else (read,)
                    found = torch.autograd.grad(value * step_weight, wanted)
                gradients[step].index_add_(0, rows, found[0])
                if learns_head:
                    head_gradient += found[1]
                counted = [value.detach(), matches, compared.sum(), drafted.sum()]
                sums[:, step] += torch.stack(counted)
        ctx.save_for_backward(head_gradient, *gradients)
        ctx.mark_non_differentiable(sums)
        weights = sums.new_tensor(loss.step_weights)
        return (sums[0] * weights).sum(), sums  # a product under autocast would be rounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        head, *states = ctx.saved_tensors
        of_head = gradient * head if ctx.needs_input_grad[2] else None
        return None, None, of_head, *((gradient * one).to(one.dtype) for one in states)


_blockwise = cast(Callable[..., tuple[Tensor, Tensor]], _BlockwiseLoss.apply)
