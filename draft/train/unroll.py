"""Training-time test: a drafter run on its own states, as deep as it will draft (EAGLE-3, section
3.1).

Step k of row i takes the token i + k + 1 and the state that step k - 1 left there (at step 0 what
`start` makes of the target's features), at position i + k, and predicts token i + k + 2. That is
what a worker runs when it drafts k tokens past the root i + 1 and they are those of the document.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specengine.draft.train.attention import StepKV, TttAttention
from specengine.draft.train.documents import DraftRows
from specengine.draft.train.layer import DraftLayer
from specengine.draft.train.teacher import Teacher
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.rotary import RotaryEmbedding

T = TypeVar("T")


@dataclass(frozen=True)
class Borrowed:
    """The target's own tables, which a drafter reads and does not change."""

    embed_table: Tensor  # [V, H]
    head: Tensor | None  # [draft vocabulary, H], rows of the target's head; None: it has its own
    cos_sin: Tensor  # float32 [positions, head_dim]


@dataclass(frozen=True)
class LayerInput:
    attended: Tensor  # what attention reads
    residual: Tensor  # the stream that the layer adds to, [R, H]


class UnrolledDraft(nn.Module, ABC):
    """A drafter of one layer. Families say what goes into the layer and what becomes of it."""

    def __init__(self, borrowed: Borrowed, compiles: bool = False) -> None:
        super().__init__()
        self.borrowed = borrowed
        self.before: Callable[..., Any] = self._before
        self.after: Callable[..., Any] = self._after
        if compiles:
            self.before, self.after = (
                torch.compile(self._before, dynamic=False),
                torch.compile(self._after, dynamic=False),
            )

    @property
    @abstractmethod
    def decoder_layer(self) -> DraftLayer: ...

    @abstractmethod
    def start(self, rows: DraftRows) -> Tensor:
        """What step 0 continues, [R, H]."""

    @abstractmethod
    def layer_input(self, state: Tensor, embedded: Tensor) -> LayerInput: ...

    @abstractmethod
    def next_state(self, stream: Tensor) -> Tensor: ...

    @abstractmethod
    def head_input(self, state: Tensor) -> Tensor: ...

    @abstractmethod
    def head(self) -> Tensor:
        """[draft vocabulary, H]"""

    def forward(
        self,
        rows: DraftRows,
        attention: TttAttention,
        num_steps: int,
        judge: Callable[[list[Tensor], Tensor], T],
    ) -> T:
        """What `judge` makes of what the head reads at each step, [R, H], and of the head."""
        return judge(self.unroll(rows, attention, num_steps), self.head())

    def unroll(self, rows: DraftRows, attention: TttAttention, num_steps: int) -> list[Tensor]:
        state, steps, read = self.start(rows), list[StepKV](), []
        # What is not learned from runs seldom, and is not worth compiling.
        compiled = torch.is_grad_enabled()
        before, after = (self.before, self.after) if compiled else (self._before, self._after)
        last = len(self.borrowed.cos_sin) - 1
        for step in range(num_steps):
            # Rows that would reach past the table reach past their document too.
            cos_sin = self.borrowed.cos_sin[(rows.positions + step).clamp(max=last)]
            q, k, v, residual = before(state, rows.tokens_at(step), cos_sin)
            steps.append(StepKV(k, v))
            state, head_input = after(attention.attend(q, steps), residual)
            read.append(head_input)
        return read

    def _before(
        self, state: Tensor, tokens: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = self.layer_input(state, F.embedding(tokens, self.borrowed.embed_table))
        q, k, v = self.decoder_layer.self_attn(given.attended, cos_sin)
        return q, k, v, given.residual

    def _after(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        state = self.next_state(self.decoder_layer.finish(heads, residual))
        return state, self.head_input(state)


def borrowed_head(borrowed: Borrowed) -> Tensor:
    return cast(Tensor, borrowed.head)


def rotary_table(teacher: Teacher, shape: LayerSpec, parameters: dict[str, Any]) -> Tensor:
    """float32 [positions, head_dim] on the teacher's device."""
    positions = teacher.config.max_position_embeddings
    rotary = RotaryEmbedding(shape.head_dim, positions, parameters)
    return rotary.cos_sin_cache.to(teacher.device)
