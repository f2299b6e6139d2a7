"""How often a drafter is right about texts that the target wrote: teacher-forced, all rows of all
texts in a forward a level.

Where a chain's first d drafts are accepted, they are the target's own next tokens. So the
acceptance of each further draft, given those before it, is that of a row that was fed them: nothing
is sampled and no round is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specengine.core.batch import AttentionBackend, ForwardBatch, ForwardMode, ModelWorkerBatch
from specengine.core.model import DecoderModel
from specengine.core.tree import Tree
from specengine.draft.loaded import LoadedDraft
from specengine.lab.doctor.hypothesis import View
from specengine.lab.doctor.target_rows import TargetRows, texts_runner
from specengine.runner.model_runner import ModelRunner

LEVELS = 3
_LOWEST = -20.0  # log-probability of what a drafter cannot say


@dataclass(frozen=True)
class Judgement:
    """hits: bool [R, levels], whether each level says the target's token when those above it do.
    logprobs: float64 [R], of the target's token on the first level. prompts: int64 [R]."""

    hits: NDArray[np.bool_]
    logprobs: NDArray[np.float64]
    prompts: NDArray[np.int64]

    @property
    def accepted(self) -> NDArray[np.int64]:
        """[R], tokens of a chain that would be accepted."""
        lengths: NDArray[np.int64] = np.cumprod(self.hits, axis=1).sum(1)
        return lengths


class Judge(Protocol):
    """Runs the drafts of one family."""

    def judge(self, lessons: Lessons, view: View) -> Judgement: ...


class Lessons:
    """Texts side by side, N rows each, and which rows are judged: those of the answers that every
    view and level has tokens for. Row i belongs to the round whose root is token i + 1. What lies
    past a text's own rows is padding, which none of those sees.

    tokens_BM, greedy_BM: int64, M > N. judged: flat over [B, N]. prompts: int64 [R].
    """

    def __init__(self, texts: Sequence[TargetRows]) -> None:
        self.texts = texts
        self.counts = [num_rows(rows) for rows in texts]
        self.width = max(self.counts)
        self.tokens_BM = self._padded([rows.tokens for rows in texts])
        self.greedy_BM = self._padded([rows.greedy for rows in texts])
        self.judged: list[int] = []
        prompts: list[int] = []
        for number, (rows, count) in enumerate(zip(texts, self.counts, strict=True)):
            answered = range(rows.text.prompt_len - 1, count)
            self.judged += [number * self.width + row for row in answered]
            prompts += [rows.text.prompt] * len(answered)
        self.prompts = np.array(prompts, dtype=np.int64)

    def tokens(self, ahead: int) -> Tensor:
        """int64 [B N], the token so many places after each row."""
        return self.tokens_BM[:, ahead : ahead + self.width].flatten()

    def labels(self, ahead: int) -> Tensor:
        """int64 [R], the target's token after that, of the rows that are judged."""
        return self.greedy_BM[:, ahead : ahead + self.width].flatten()[self.judged]

    def _padded(self, rows: list[Tensor]) -> Tensor:
        longest = self.width + LEVELS + 2
        filler = rows[0].new_zeros(longest)
        return pad_sequence([*rows, filler], batch_first=True)[:-1]


def num_rows(rows: TargetRows) -> int:
    """Rows of a text that every view and level has tokens for."""
    return len(rows.tokens) - LEVELS - 2


class FeatureJudge:
    """Drafters that continue the target's states: EAGLE, EAGLE-3, and MTP's first layer."""

    def __init__(self, draft: LoadedDraft, device: torch.device, backend: AttentionBackend) -> None:
        self.model: Any = draft.models[0]
        self.place = (device, draft.kv_shape, backend)
        self.feature_layers = list(draft.feature_layers)

    @torch.inference_mode()
    def judge(self, lessons: Lessons, view: View) -> Judgement:
        size = (len(lessons.texts), lessons.width)
        runner = texts_runner(self.model, *self.place, size[0], LEVELS * size[1])
        features = [self.features(rows, view) for rows in lessons.texts]
        cut = [one[:count] for one, count in zip(features, lessons.counts, strict=True)]
        states = pad_sequence(cut, batch_first=True).flatten(0, 1)
        hits, logprobs = [], states.new_empty(0)
        for level in range(LEVELS):
            step = plan_level(runner, size, level, view.position_step, lessons.judged)
            step.input_ids = lessons.tokens(1 + level + view.token_shift)
            step.features = states
            output = runner.forward(step)
            assert output.hidden is not None
            states = output.hidden
            labels = lessons.labels(1 + level + view.label_shift)
            hits.append(best_tokens(self.model, output.logits) == labels)
            if level == 0:
                logprobs = label_logprobs(self.model, output.logits, labels)
        return as_judgement(hits, logprobs, lessons)

    def features(self, rows: TargetRows, view: View) -> Tensor:
        """[n, H], what rows of the first level continue."""
        if self.feature_layers:
            fused: Tensor = self.model.fuse(rows.layers[:, self.feature_layers].flatten(1))
            return fused
        return rows.layers[:, -1] if view.before_norm else rows.final


def plan_level(
    runner: ModelRunner, size: tuple[int, int], level: int, position_step: int, judged: list[int]
) -> ForwardBatch:
    """A forward over [B, N] rows. Row i of a level sees rows 0 to i of the first level, and rows i
    of those between."""
    (texts, count), device = size, runner.device
    tree = None
    if level:
        causal = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        own = torch.eye(count, dtype=torch.bool, device=device)
        depths = torch.arange(count, device=device) + level * position_step
        mask = torch.cat([causal, *[own] * level], dim=1)
        tree = Tree(depths.repeat(texts), mask.expand(texts, -1, -1), num_past=level * count)
    return runner.new_forward_batch(
        ModelWorkerBatch(
            forward_mode=ForwardMode.DRAFT_EXTEND,
            input_ids=torch.zeros(texts * count, dtype=torch.int64),
            req_pool_indices=list(range(1, texts + 1)),
            prefix_lens=[level * count] * texts,
            extend_lens=[count] * texts,
            logits_rows=judged,
            sampling=None,
            tree=tree,
        )
    )


class ModelJudge:
    """Drafters that are whole models: their own text, their own states."""

    def __init__(self, draft: LoadedDraft, device: torch.device, backend: AttentionBackend) -> None:
        (self.model,) = draft.models
        self.place = (device, draft.kv_shape, backend)

    @torch.inference_mode()
    def judge(self, lessons: Lessons, view: View) -> Judgement:
        """What row i of the other families drafts after, is this one's row i + 1."""
        width = lessons.width + LEVELS
        texts = len(lessons.texts)
        runner = texts_runner(self.model, *self.place, texts, width)
        rows = [
            index // lessons.width * width + index % lessons.width + 1 + level
            for level in range(LEVELS)
            for index in lessons.judged
        ]
        output = runner.forward(
            ModelWorkerBatch(
                forward_mode=ForwardMode.EXTEND,
                input_ids=lessons.tokens_BM[:, :width].flatten(),
                req_pool_indices=list(range(1, texts + 1)),
                prefix_lens=[0] * texts,
                extend_lens=[width] * texts,
                logits_rows=rows,
                sampling=None,
            )
        )
        labels = torch.cat([lessons.labels(1 + level) for level in range(LEVELS)])
        hits = best_tokens(self.model, output.logits) == labels
        first = slice(len(lessons.judged))
        logprobs = label_logprobs(self.model, output.logits[first], labels[first])
        return as_judgement(hits.chunk(LEVELS), logprobs, lessons)


def best_tokens(model: DecoderModel, logits: Tensor) -> Tensor:
    """int64 [R], as the target's ids."""
    ids: Tensor | None = getattr(model, "target_ids", None)
    best = logits.argmax(-1)
    return best if ids is None else ids[best]


def label_logprobs(model: DecoderModel, logits: Tensor, labels: Tensor) -> Tensor:
    """float32 [R], of the target's tokens under the drafter."""
    ids: Tensor | None = getattr(model, "target_ids", None)
    found = logits.log_softmax(-1)
    if ids is None:
        return found.gather(1, labels[:, None])[:, 0].clamp(min=_LOWEST)
    sorted_ids, order = ids.sort()
    place = torch.searchsorted(sorted_ids, labels).clamp(max=len(ids) - 1)
    logprobs = found.gather(1, order[place][:, None])[:, 0].clamp(min=_LOWEST)
    return logprobs.where(sorted_ids[place] == labels, _LOWEST)


def as_judgement(hits: Sequence[Tensor], logprobs: Tensor, lessons: Lessons) -> Judgement:
    return Judgement(
        torch.stack(list(hits), dim=1).cpu().numpy(),
        logprobs.double().cpu().numpy(),
        lessons.prompts,
    )
