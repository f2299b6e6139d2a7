"""Trees that are sampled on the device, as requests ask for it by row of the page table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specengine.core.batch import RowBatch
from specengine.core.random_streams import Stream
from specengine.draft.choice import rank_scores
from specengine.engine.row_draws import expanded
from specengine.kernels.draw_siblings import draw_siblings
from specengine.kernels.keyed_uniform import LANE, keyed_uniform
from specengine.kernels.sample_rows import SEED, SHIFT, TEMPERATURE, ChoiceTable, Places
from specengine.kernels.tree_build import DraftTree
from specengine.kernels.tree_step import Drawn
from specengine.kernels.weigh_rows import weigh_rows


@dataclass(frozen=True)
class TreeNumbers:
    """What is the same in every round of trees of topk branches. Made before any capture, in which
    it would be nodes of the graph."""

    topk: int
    keys: list[Tensor]  # int64 [P * K] a level: what its draws are keyed by, past a request's start
    # Rows of weights of B requests lie a level after the other. Of a request's R rows, in order of
    # the nodes that were gone on with:
    within_BR: Tensor  # int64, where each lies in its level
    levels_R: Tensor  # int64, rows before that level, in units of B: 0, 1, .. 1, 1 + K, ..
    scores_K: Tensor  # float32, of drawn siblings: by rank

    @classmethod
    def of(cls, batch_size: int, topk: int, num_steps: int, device: torch.device) -> TreeNumbers:
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


class TreeWeights(Protocol):
    """What the nodes of a round's trees were drawn from."""

    def drawn_from(self, tree: DraftTree) -> Tensor | None:
        """float32 [B, N, V], up to a factor; None where nobody wants it. Roots have none that is
        read, nor has what is missing."""
        ...


class RowTreeDraws:
    """TreeDraws of one round: what DraftChoice draws in trees, by the same numbers. Greedy requests
    get the best tokens.

    What was drawn from is kept for whoever wants it, a row for each node that was gone on with, and
    lies in the pool of a capture: it stands until the graph has run, and no longer.
    """

    def __init__(
        self, rows: RowBatch, table: ChoiceTable, numbers: TreeNumbers, vocab_size: int, keeps: bool
    ) -> None:
        """vocab_size: of the target."""
        words_B = table.words.index_select(0, rows.rows_B)
        self.rows = rows
        self.table = table
        self.numbers = numbers
        self.vocab_size = vocab_size
        self.seeds_B1 = words_B[:, SEED, None]
        self.starts_B1 = (rows.lens_B + words_B[:, SHIFT])[:, None]
        self.greedy_B = table.column(TEMPERATURE).index_select(0, rows.rows_B) == 0.0
        num_rows = numbers.within_BR.shape[1] if keeps else numbers.topk
        size = len(rows.rows_B) * num_rows, vocab_size
        self.weights_SV = torch.empty(size, device=rows.rows_B.device)
        self.keeps = keeps
        self._level = self._first = 0

    def take(self, logits_TV: Tensor, target_ids: Tensor | None) -> Drawn:
        keys_C = self.numbers.keys[self._level]
        count, first = len(logits_TV), self._first if self.keeps else 0
        weights_TV = self.weights_SV[first : first + count]
        self._level, self._first = self._level + 1, first + count
        expanded(logits_TV, target_ids, self.vocab_size, weights_TV)
        batch_size = len(self.greedy_B)
        places = Places(self.rows.rows_B, self.rows.lens_B, count // batch_size)
        weigh_rows(weights_TV, self.table, places, int(Stream.DRAFT))
        keys_BC = self.starts_B1 + keys_C
        seeds_BC = self.seeds_B1.expand_as(keys_BC).contiguous()
        uniforms_BC = keyed_uniform(seeds_BC.view(-1), keys_BC.view(-1), int(Stream.DRAFT))
        tokens_TK = draw_siblings(weights_TV, uniforms_BC.view(count, self.numbers.topk))
        return Drawn(tokens_TK, self.numbers.scores_K, self.greedy_B)

    def drawn_from(self, tree: DraftTree) -> Tensor | None:
        """As TreeWeights."""
        if not self.keeps:
            return None
        assert tree.candidates_BN is not None, "of a limited tree"
        numbers, batch_size = self.numbers, len(self.greedy_B)
        rows_BR = numbers.within_BR[:batch_size] + batch_size * numbers.levels_R
        rows_BN = rows_BR.gather(1, tree.candidates_BN // numbers.topk)
        weights = self.weights_SV.index_select(0, rows_BN.view(-1))
        return weights.view(*rows_BN.shape, self.vocab_size)
