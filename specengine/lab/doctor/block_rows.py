"""How often a drafter of whole blocks (DFlash) is right about texts that the target wrote.

All drafts of a block come from one forward, whose masked rows see each other and no drafted token.
So a block is judged once a root, by the target's own tokens behind that root.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specengine.core.batch import AttentionBackend, ForwardMode, ModelWorkerBatch
from specengine.core.tree import Tree
from specengine.draft.dflash.model import DFlashModel
from specengine.draft.loaded import LoadedDraft
from specengine.lab.doctor.draft_rows import (
    LEVELS,
    Judgement,
    Lessons,
    as_judgement,
    best_tokens,
    label_logprobs,
)
from specengine.lab.doctor.hypothesis import View
from specengine.memory.kv_cache import MHATokenToKVPool
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.runner.model_runner import MemoryPools, ModelRunner

_AT_ONCE = 64  # blocks of a forward


def masks_judged(num_steps: int) -> int:
    """Masks of a block that is judged: as many as serving begins with, and LEVELS at least."""
    return max(num_steps, LEVELS)


def unjudged_drafts(num_steps: int) -> list[str]:
    """What no judgement of blocks says about serving with so many drafts, in words."""
    if num_steps > LEVELS:
        return [
            f"drafts {LEVELS + 1} to {num_steps} of each block; they are in the forward, and what "
            "they say is not compared"
        ]
    if num_steps < LEVELS:
        return [f"blocks of {num_steps} masks: those that are judged have {LEVELS}"]
    return []


class BlockJudge:
    """Each text has a row of the page table, in whose slots is the draft's KV of the target's
    features. Each block has one too: it begins with slots of its text, and goes on in its own."""

    def __init__(
        self, draft: LoadedDraft, device: torch.device, backend: AttentionBackend, num_masks: int
    ) -> None:
        self.model = cast(DFlashModel, draft.models[0])
        self.device, self.kv_shape, self.backend = device, draft.kv_shape, backend
        self.feature_layers = list(draft.feature_layers)
        self.width = 1 + num_masks

    @torch.inference_mode()
    def judge(self, lessons: Lessons, view: View) -> Judgement:
        """Of the view, label_shift and position_step count: a block's row i is i steps behind
        its root, and says the token label_shift tokens behind its own place."""
        runner = self._runner(lessons)
        self._write_context(runner, lessons)
        logits = [
            self._run_blocks(runner, lessons, lessons.judged[first : first + _AT_ONCE], view)
            for first in range(0, len(lessons.judged), _AT_ONCE)
        ]
        logits_RLV = torch.cat(logits)
        labels = [lessons.labels(1 + level + view.label_shift) for level in range(LEVELS)]
        hits = [
            best_tokens(self.model, logits_RLV[:, level]) == labels[level]
            for level in range(LEVELS)
        ]
        logprobs = label_logprobs(self.model, logits_RLV[:, 0], labels[0])
        return as_judgement(hits, logprobs, lessons)

    def _runner(self, lessons: Lessons) -> ModelRunner:
        texts, count = len(lessons.texts), lessons.width
        table = ReqToTokenPool(texts + _AT_ONCE, count + self.width, self.device)
        slots = torch.arange(1, texts * count + 1, device=self.device)
        table.req_to_token[1 : 1 + texts, :count] = slots.view(texts, count)
        num_slots = texts * count + _AT_ONCE * self.width + 1
        kv = MHATokenToKVPool(num_slots, self.kv_shape, self.device)
        return ModelRunner(self.model, self.device, MemoryPools(table, kv), self.backend)

    def _write_context(self, runner: ModelRunner, lessons: Lessons) -> None:
        features = [
            self.model.fuse(rows.layers[:count, self.feature_layers].flatten(1))
            for rows, count in zip(lessons.texts, lessons.counts, strict=True)
        ]
        texts = len(features)
        step = runner.new_forward_batch(
            ModelWorkerBatch(
                forward_mode=ForwardMode.DRAFT_EXTEND,
                input_ids=torch.zeros(texts * lessons.width, dtype=torch.int64),
                req_pool_indices=list(range(1, texts + 1)),
                prefix_lens=[0] * texts,
                extend_lens=[lessons.width] * texts,
                logits_rows=[0],
                sampling=None,
            )
        )
        step.features = pad_sequence(features, batch_first=True).flatten(0, 1)
        runner.forward(step)

    def _run_blocks(
        self, runner: ModelRunner, lessons: Lessons, judged: list[int], view: View
    ) -> Tensor:
        """float32 [n, LEVELS, V], of the first masked rows of the blocks of rows `judged`."""
        count, width = len(judged), self.width
        starts = [row % lessons.width + 1 for row in judged]
        rows = self._rows_of_blocks(runner.page_table, lessons, judged)
        tokens = torch.full((count, width), self.model.form.mask_token_id, device=self.device)
        tokens[:, 0] = lessons.tokens(1)[judged]
        chosen = range(1, 1 + LEVELS)
        output = runner.forward(
            ModelWorkerBatch(
                forward_mode=ForwardMode.DRAFT_EXTEND,
                input_ids=tokens.flatten().cpu(),
                req_pool_indices=rows,
                prefix_lens=starts,
                extend_lens=[width] * count,
                logits_rows=[block * width + row for block in range(count) for row in chosen],
                sampling=None,
                tree=self._tree(starts, view.position_step),
            )
        )
        return output.logits.view(count, LEVELS, -1)

    def _rows_of_blocks(self, table: Tensor, lessons: Lessons, judged: list[int]) -> list[int]:
        """The page table's rows of blocks, filled in."""
        texts, count, width = len(lessons.texts), lessons.width, self.width
        rows = list(range(1 + texts, 1 + texts + len(judged)))
        for block, (row, place) in enumerate(zip(rows, judged, strict=True)):
            text, start = place // count + 1, place % count + 1
            first = texts * count + 1 + block * width
            table[row, :start] = table[text, :start]
            table[row, start : start + width] = torch.arange(first, first + width)
        return rows

    def _tree(self, starts: list[int], position_step: int) -> Tree:
        """Blocks whose every row sees every row of its own. Rows past the last position that the
        model has take that one: they are past what is judged."""
        last = int(self.model.config.max_position_embeddings) - 1
        steps_W = torch.arange(self.width) * position_step
        left_N1 = last - torch.tensor(starts)[:, None]
        depths_T = torch.minimum(steps_W, left_N1).flatten().to(self.device)
        size = (len(starts), self.width, self.width)
        return Tree(depths_T, torch.ones(size, dtype=torch.bool, device=self.device))
