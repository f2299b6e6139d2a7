"""What requests want changed of the logits of drafts, node by node of a tree."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specengine.engine.row_draws import expanded
from specengine.engine.row_edits import EditsOfTrees
from specengine.kernels.edit_rows import Drafted, edit_rows_
from specengine.kernels.tree_step import Beams


@dataclass(frozen=True)
class EditsOfNodes(EditsOfTrees):
    """Of one round: the logits of each draft are edited as the target's will be there. As in
    DraftChoice, tokens that were drafted above it count, and what the draft cannot say is there,
    too: logits are of the target's vocabulary."""

    levels: list[Tensor] = field(default_factory=list)  # int64 [B, K] each, tokens gone on with

    def in_tree(
        self, logits_TV: Tensor, target_ids: Tensor | None, beams: Beams | None
    ) -> tuple[Tensor, None]:
        """In place where there are no target_ids."""
        full_TV = expanded(logits_TV, target_ids, self.tables.bias.shape[1])
        return edit_rows_(full_TV, self.tables, self._above(beams)), None

    def _above(self, beams: Beams | None) -> Drafted:
        rows_B, starts_B = self.rows.rows_B, self.rows.lens_B
        if beams is None:
            return Drafted(rows_B, starts_B, self.rows.roots_B[:, None])
        # What is not there has token -1.
        self.levels.append(beams.tokens_BK.clamp(min=0))
        path = torch.cat(self.levels, dim=1), beams.depths_T, beams.mask_BKN
        return Drafted(rows_B, starts_B + 1, *path, has_root=False)
