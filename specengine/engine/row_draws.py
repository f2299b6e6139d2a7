"""How rounds on the device pick drafts of chains, where these are not simply the best tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.batch import RowBatch
from specengine.core.draft_choosing import DraftPicks
from specengine.core.random_streams import Stream
from specengine.engine.row_edits import EditsOfChains
from specengine.kernels.keyed_uniform import LANE
from specengine.kernels.sample_rows import ChoiceTable, Places, sample_rows
from specengine.kernels.tree_build import DraftTree
from specengine.kernels.weigh_rows import weigh_rows


class EditedBest(DraftPicks):
    """Of one round: the best tokens of edited logits."""

    def __init__(self, edits: EditsOfChains, vocab_size: int) -> None:
        """vocab_size: of the target."""
        self.edits = edits
        self.vocab_size = vocab_size

    def take(self, logits_BV: Tensor, target_ids: Tensor | None) -> Tensor:
        full_BV = expanded(logits_BV, target_ids, self.vocab_size)
        self.edits.apply(full_BV)
        best_B = full_BV.argmax(-1)
        self.edits.go_on(best_B)
        return best_B


class RowDraws(DraftPicks):
    """DraftPicks of one round: what DraftChoice draws in chains, by the same numbers. Greedy
    requests get the best tokens.

    weights_BNV: float32, of N nodes a request, what each was drawn from, for whoever keeps them;
    the root's row is never written, and rows of greedy requests mean nothing. Made in a capture
    they lie in its pool, and so stand until the graph has run, and no longer.
    """

    def __init__(
        self,
        rows: RowBatch,
        table: ChoiceTable,
        num_nodes: int,
        vocab_size: int,
        keeps: bool,
        edits: EditsOfChains | None = None,
    ) -> None:
        """num_nodes: root included. vocab_size: of the target."""
        self.rows = rows
        self.table = table
        self.vocab_size = vocab_size
        self.edits = edits
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
        kept_BV = None if self.weights_BNV is None else self.weights_BNV[:, self._node]
        full_BV = expanded(logits_BV, target_ids, self.vocab_size, kept_BV)
        if self.edits is not None:
            self.edits.apply(full_BV)
        if kept_BV is None:
            tokens_B = sample_rows(full_BV, *given, in_place=True)
        else:
            tokens_B = weigh_rows(full_BV, *given)
        if self.edits is not None:
            self.edits.go_on(tokens_B)
        return tokens_B

    def override(self, tokens_BK: Tensor, are_B: Tensor) -> None:
        """Deeper than anything was drawn nobody else has drafts: all weights there are 0."""
        if self.weights_BNV is not None:
            drawn_BDV, deeper_BEV = self.weights_BNV[:, 1:].tensor_split([self._node], dim=1)
            drawn_BDV.masked_fill_(are_B[:, None, None], 0.0)
            deeper_BEV.zero_()
            make_certain_(self.weights_BNV[:, 1:], tokens_BK, are_B)

    def drawn_from(self, tree: DraftTree) -> Tensor | None:
        """As row_tree_draws.TreeWeights, of chains in trees of as many nodes."""
        if self.weights_BNV is not None:
            self.weights_BNV[:, self._node + 1 :].zero_()
        return self.weights_BNV


def make_certain_(weights_BNV: Tensor, tokens_BN: Tensor, are_B: Tensor) -> None:
    """In place, a weight of 1 on each token of these requests, whose weights are 0. are_B: bool."""
    tokens_BN1, are_B11 = tokens_BN[:, :, None], are_B[:, None, None]
    new_BN1 = weights_BNV.gather(2, tokens_BN1).masked_fill_(are_B11, 1.0)
    weights_BNV.scatter_(2, tokens_BN1, new_BN1)


def expanded(
    logits_BV: Tensor, target_ids: Tensor | None, vocab_size: int, out_BV: Tensor | None = None
) -> Tensor:
    """Over the target's vocabulary; what the draft cannot say has minus infinity. out_BV: where
    they are to be."""
    if target_ids is None:
        return logits_BV if out_BV is None else out_BV.copy_(logits_BV)
    if out_BV is None:
        out_BV = logits_BV.new_empty(len(logits_BV), vocab_size)
    return out_BV.fill_(float("-inf")).index_copy_(1, target_ids, logits_BV)
