"""Drafts that are sampled on the device, as requests ask for it by row of the page table."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.batch import RowBatch
from specengine.core.draft_choosing import DraftPicks
from specengine.core.random_streams import Stream
from specengine.kernels.keyed_uniform import LANE
from specengine.kernels.sample_rows import ChoiceTable, Places, sample_rows
from specengine.kernels.weigh_rows import weigh_rows


class RowDraws(DraftPicks):
    """DraftPicks of one round: what DraftChoice draws in chains, by the same numbers. Greedy
    requests get the best tokens.

    weights_BNV: float32, of N nodes a request, what each was drawn from, for whoever keeps them;
    the root's row is never written, and rows of greedy requests mean nothing. Made in a capture
    they lie in its pool, and so stand until the graph has run, and no longer.
    """

    def __init__(
        self, rows: RowBatch, table: ChoiceTable, num_nodes: int, vocab_size: int, keeps: bool
    ) -> None:
        """num_nodes: root included. vocab_size: of the target."""
        self.rows = rows
        self.table = table
        self.vocab_size = vocab_size
        self.weights_BNV: Tensor | None = None
        if keeps:
            size = num_nodes, len(rows.rows_B), vocab_size
            self.weights_BNV = torch.empty(size, device=rows.rows_B.device).transpose(0, 1)
        self._node = 0  # that was drawn last

    def take(self, logits_BV: Tensor, target_ids: Tensor | None) -> Tensor:
        depth, self._node = self._node, self._node + 1
        # A draw is keyed by output position, and by the node as its lane.
        places = Places(self.rows.rows_B, self.rows.lens_B + (depth + self._node * LANE))
        given = self.table, places, int(Stream.DRAFT)
        if self.weights_BNV is None:
            full_BV = logits_BV
            if target_ids is not None:
                full_BV = self._expand(logits_BV.new_empty(self._shape), logits_BV, target_ids)
            return sample_rows(full_BV, *given, in_place=True)
        full_BV = self.weights_BNV[:, self._node]
        if target_ids is None:
            full_BV.copy_(logits_BV)
        else:
            self._expand(full_BV, logits_BV, target_ids)
        return weigh_rows(full_BV, *given)

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.rows.rows_B), self.vocab_size

    def _expand(self, full_BV: Tensor, logits_BV: Tensor, target_ids: Tensor) -> Tensor:
        """Over the target's vocabulary; what the draft cannot say has minus infinity."""
        return full_BV.fill_(float("-inf")).index_copy_(1, target_ids, logits_BV)
