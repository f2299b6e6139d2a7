"""How rounds on the device choose drafts that are not simply the best tokens, and what sampled
drafts were drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specengine.core.draft_picks import DraftPicks
from specengine.core.random_streams import Stream
from specengine.core.rows import RowBatch
from specengine.draft.choice import rank_scores
from specengine.engine.round.edits import ChainEdits, expanded
from specengine.kernels.sample.draw_siblings import draw_siblings
from specengine.kernels.sample.keyed_uniform import LANE, keyed_uniform
from specengine.kernels.sample.sample_rows import sample_rows
from specengine.kernels.sample.types import SEED, SHIFT, TEMPERATURE, ChoiceTable, DrawPlaces
from specengine.kernels.sample.weigh_rows import weigh_rows
from specengine.kernels.tree.types import DraftTree, Drawn


class DraftWeights(Protocol):
    """What the drafts of a round were drawn from."""

    def drawn_from(self, tree: DraftTree | None) -> Tensor | None:
        """float32 [B, N, V], up to a factor, of the nodes of these trees or, with None, of chains.
        None where no rule needs it. The rows of roots and of nodes that do not exist are not read.
        """
        ...


class EditedBest(DraftPicks):
    """The best tokens of edited logits, in the chains of one round."""

    def __init__(self, edits: ChainEdits, vocab_size: int) -> None:
        """vocab_size: of the target."""
        self.edits = edits
        self.vocab_size = vocab_size

    def take(self, logits_BV: Tensor, target_ids: Tensor | None) -> Tensor:
        full_BV = expanded(logits_BV, target_ids, self.vocab_size)
        self.edits.apply(full_BV)
        best_B = full_BV.argmax(-1)
        self.edits.advance(best_B)
        return best_B


class ChainDraws(DraftPicks):
    """The sampled drafts of one round of chains: what DraftChoice draws, by the same uniforms.
    Greedy requests get the best tokens.

    weights_BNV: float32, of N nodes a request, what each was drawn from, where they are kept. The
    root's row is never written, and rows of greedy requests mean nothing. Memory: in a capture it
    lies in the graphs' pool, and is valid until the graph has run.
    """

    def __init__(
        self,
        rows: RowBatch,
        table: ChoiceTable,
        num_nodes: int,
        vocab_size: int,
        keeps: bool,
        edits: ChainEdits | None = None,
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
        places = DrawPlaces(self.rows.rows_B, self.rows.lens_B + (depth + self._node * LANE))
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
            self.edits.advance(tokens_B)
        return tokens_B

    def override(self, tokens_BK: Tensor, are_B: Tensor) -> None:
        """Below the levels that were drawn, other requests have no drafts: all weights are 0."""
        if self.weights_BNV is not None:
            drawn_BDV, deeper_BEV = self.weights_BNV[:, 1:].tensor_split([self._node], dim=1)
            drawn_BDV.masked_fill_(are_B[:, None, None], 0.0)
            deeper_BEV.zero_()
            make_certain_(self.weights_BNV[:, 1:], tokens_BK, are_B)

    def drawn_from(self, tree: DraftTree | None) -> Tensor | None:
        """As DraftWeights. Of trees that are chains padded with further nodes."""
        if tree is not None and self.weights_BNV is not None:
            self.weights_BNV[:, self._node + 1 :].zero_()
        return self.weights_BNV


def make_certain_(weights_BNV: Tensor, tokens_BN: Tensor, are_B: Tensor) -> None:
    """In place, a weight of 1 on each token of these requests, whose weights are 0. are_B: bool."""
    tokens_BN1, are_B11 = tokens_BN[:, :, None], are_B[:, None, None]
    new_BN1 = weights_BNV.gather(2, tokens_BN1).masked_fill_(are_B11, 1.0)
    weights_BNV.scatter_(2, tokens_BN1, new_BN1)


@dataclass(frozen=True)
class TreeKeys:
    """Constants of sampled trees of topk branches. Made before any capture: made in one, they would
    be nodes of the graph."""

    topk: int
    keys: list[Tensor]  # int64 [P * K] a level: what its draws are keyed by, past a request's start
    # Rows of weights of B requests lie a level after the other. Of a request's R rows, in order of
    # the nodes that were expanded:
    within_BR: Tensor  # int64, where each lies in its level
    levels_R: Tensor  # int64, rows before that level, in units of B: 0, 1, .. 1, 1 + K, ..
    scores_K: Tensor  # float32, of drawn siblings: by rank

    @classmethod
    def of(cls, batch_size: int, topk: int, num_steps: int, device: torch.device) -> TreeKeys:
        """batch_size: the largest."""
        keys, first = list[Tensor](), 1
        for depth in range(num_steps):
            count = topk if depth == 0 else topk**2
            lanes = torch.arange(first, first + count, device=device)
            keys.append(depth + lanes * LANE)
            first += count
        more = num_steps - 1
        beams_R = torch.tensor([0, *[*range(topk)] * more], device=device)
        widths_R = torch.tensor([1, *[topk] * (topk * more)], device=device)
        levels_R = torch.tensor([0, *(1 + n // topk * topk for n in range(topk * more))])
        requests_B1 = torch.arange(batch_size, device=device)[:, None]
        scores_1K = rank_scores(torch.empty(1, topk, device=device))
        within_BR = requests_B1 * widths_R + beams_R
        return cls(topk, keys, within_BR, levels_R.to(device), scores_1K[0].contiguous())


class SampledTreeDraws:
    """The sampled drafts of one round of trees: what DraftChoice draws, by the same uniforms.
    Greedy requests get the best tokens.

    What was drawn from is kept on demand, a row for each node that was expanded. Memory: in a
    capture it lies in the graphs' pool, and is valid until the graph has run.
    """

    def __init__(
        self, rows: RowBatch, table: ChoiceTable, tree_keys: TreeKeys, vocab_size: int, keeps: bool
    ) -> None:
        """vocab_size: of the target. keeps: what was drawn from."""
        words_B = table.words.index_select(0, rows.rows_B)
        self.rows = rows
        self.table = table
        self.tree_keys = tree_keys
        self.vocab_size = vocab_size
        self.seeds_B1 = words_B[:, SEED, None]
        self.starts_B1 = (rows.lens_B + words_B[:, SHIFT])[:, None]
        self.greedy_B = table.column(TEMPERATURE).index_select(0, rows.rows_B) == 0.0
        num_rows = tree_keys.within_BR.shape[1] if keeps else tree_keys.topk
        size = len(rows.rows_B) * num_rows, vocab_size
        self.weights_SV = torch.empty(size, device=rows.rows_B.device)
        self.keeps = keeps
        self._level = self._first = 0

    def take(self, logits_TV: Tensor, target_ids: Tensor | None) -> Drawn:
        keys_C = self.tree_keys.keys[self._level]
        count, first = len(logits_TV), self._first if self.keeps else 0
        weights_TV = self.weights_SV[first : first + count]
        self._level, self._first = self._level + 1, first + count
        expanded(logits_TV, target_ids, self.vocab_size, weights_TV)
        batch_size = len(self.greedy_B)
        places = DrawPlaces(self.rows.rows_B, self.rows.lens_B, count // batch_size)
        weigh_rows(weights_TV, self.table, places, int(Stream.DRAFT))
        keys_BC = self.starts_B1 + keys_C
        seeds_BC = self.seeds_B1.expand_as(keys_BC).contiguous()
        uniforms_BC = keyed_uniform(seeds_BC.view(-1), keys_BC.view(-1), int(Stream.DRAFT))
        tokens_TK = draw_siblings(weights_TV, uniforms_BC.view(count, self.tree_keys.topk))
        return Drawn(tokens_TK, self.tree_keys.scores_K, self.greedy_B)

    def drawn_from(self, tree: DraftTree | None) -> Tensor | None:
        """As DraftWeights. Of limited trees."""
        if not self.keeps:
            return None
        assert tree is not None
        assert tree.candidates_BN is not None
        keys, batch_size = self.tree_keys, len(self.greedy_B)
        rows_BR = keys.within_BR[:batch_size] + batch_size * keys.levels_R
        rows_BN = rows_BR.gather(1, tree.candidates_BN // keys.topk)
        weights = self.weights_SV.index_select(0, rows_BN.view(-1))
        return weights.view(*rows_BN.shape, self.vocab_size)


@dataclass(frozen=True)
class LookupWeights:
    """DraftWeights of trees that all came from lookup: each draft was certain."""

    vocab_size: int

    def drawn_from(self, tree: DraftTree | None) -> Tensor | None:
        assert tree is not None
        tokens_BN = tree.tokens_BN
        size = *tokens_BN.shape, self.vocab_size
        return torch.zeros(size, device=tokens_BN.device).scatter_(2, tokens_BN[:, :, None], 1.0)


@dataclass(frozen=True)
class MixedWeights:
    """DraftWeights of trees some of which came from lookup."""

    model: DraftWeights
    from_lookup_B: Tensor  # bool

    def drawn_from(self, tree: DraftTree | None) -> Tensor | None:
        assert tree is not None
        weights_BNV = self.model.drawn_from(tree)
        if weights_BNV is not None:
            weights_BNV.masked_fill_(self.from_lookup_B[:, None, None], 0.0)
            make_certain_(weights_BNV, tree.tokens_BN, self.from_lookup_B)
        return weights_BNV
