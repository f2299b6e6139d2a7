"""Draft trees expanded on the device alone, in kernels that a graph can hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from specengine.core.draft_picks import DraftEdits, TreeDraws
from specengine.core.rows import RowBatch
from specengine.core.tree import Tree
from specengine.draft.choice import rank_scores
from specengine.kernels.tree.tree_build import tree_build
from specengine.kernels.tree.tree_step import tree_step
from specengine.kernels.tree.types import Beams, DraftTree, Found, TreeLimits
from specengine.runner.model_runner import ModelRunner


class TreeWorker(Protocol):
    """A drafter whose model drafts trees."""

    runner: ModelRunner
    topk: int
    max_nodes: int
    is_static: bool
    target_ids: Tensor | None
    first_place: int  # of the first drafted row, counted from the root's position
    continues_states: bool  # whether a row takes in the state that its token came from

    def root_states(self, rows: RowBatch) -> Tensor:
        """[B, H], those that the roots' children come from."""
        ...


class TreeRows:
    """Grows trees of the draft's best tokens, by probability or, of static trees, by rank (EAGLE-2,
    Li et al. 2024, arXiv:2406.16858).

    A level's rows go to the slots after those of the levels before it, as in draft/worker.py.
    """

    def __init__(self, worker: TreeWorker, num_rows: int) -> None:
        """num_rows: of the page table, row 0 included."""
        self.worker = worker
        device = worker.runner.device
        self.counters = torch.zeros(num_rows, dtype=torch.int32, device=device)
        ranks_1K = rank_scores(torch.empty(1, worker.topk, device=device))
        self.rank_scores = ranks_1K[0] if worker.is_static else None

    def num_nodes(self, num_steps: int) -> int:
        """Nodes of a tree so deep, root included."""
        topk = self.worker.topk
        return min(self.worker.max_nodes, 1 + topk + (num_steps - 1) * topk**2)

    def draft(
        self,
        rows: RowBatch,
        num_steps: int,
        edits: DraftEdits | None = None,
        num_nodes: int | None = None,
        limits: TreeLimits | None = None,
        draws: TreeDraws | None = None,
    ) -> DraftTree:
        """num_nodes: root included; None is as many as there may be. limits: as to tree_build.
        draws: in place of the best; with limits, which leave out what is not there."""
        worker = self.worker
        states_TH = worker.root_states(rows)
        below = self._below(rows)
        found = Found.of(len(rows.rows_B), worker.topk, num_steps, states_TH.device)
        beams = self._branch(states_TH, None, found, edits, draws)
        for _ in range(1, num_steps):
            # What is not there has no token.
            tokens_BK = beams.tokens_BK if draws is None else beams.tokens_BK.clamp(min=0)
            states_TH = self._descend(below, states_TH, beams, tokens_BK)
            beams = self._branch(states_TH, beams, found, edits, draws)
        count = self.num_nodes(num_steps) if num_nodes is None else num_nodes
        return tree_build(rows.roots_B, found, count, num_steps, limits)

    def _below(self, rows: RowBatch) -> RowBatch:
        """With the lengths that are written when the first level runs."""
        first = self.worker.first_place
        return replace(rows, lens_B=rows.lens_B + first) if first else rows

    def _descend(
        self, rows: RowBatch, states_TH: Tensor, beams: Beams, tokens_BK: Tensor
    ) -> Tensor:
        """States of the beams. states_TH: of the nodes above them."""
        runner, width = self.worker.runner, tokens_BK.shape[1]
        past = beams.mask_BKN.shape[2] - width
        tree = Tree(beams.depths_T, beams.mask_BKN, num_past=past)
        step = runner.new_row_batch(rows, tokens_BK, past, tree)
        if self.worker.continues_states:
            step.features = states_TH.index_select(0, beams.above_T)
        return runner.forward_extend(step)

    def _branch(
        self,
        states_TH: Tensor,
        beams: Beams | None,
        found: Found,
        edits: DraftEdits | None,
        draws: TreeDraws | None,
    ) -> Beams:
        worker = self.worker
        given, head = (worker.topk, self.counters), worker.runner.model.head
        if edits is None and draws is None:
            partials, ids = head.top(states_TH, worker.topk), worker.target_ids
            if partials is not None:
                return tree_step(partials, beams, found, *given, ids, self.rank_scores)
        logits_TV, ids = head.logits(states_TH), worker.target_ids
        if edits is not None:
            logits_TV, ids = edits.in_tree(logits_TV, ids, beams)
        drawn = None if draws is None else draws.take(logits_TV, ids)
        if drawn is not None and beams is not None:
            lacks_T1 = beams.tokens_BK.view(-1, 1) < 0
            drawn = replace(drawn, tokens_TK=drawn.tokens_TK.masked_fill(lacks_T1, -1))
        return tree_step(logits_TV, beams, found, *given, ids, self.rank_scores, drawn)
