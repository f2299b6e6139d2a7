"""Which tokens a draft model drafts: its best ones, or samples of its own distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specengine.core.random_streams import Stream, draw
from specengine.core.sampling_batch import SamplingBatch
from specengine.kernels.sample.draw_siblings import draw_siblings
from specengine.layers.logits import PathTokens, RowMap, edit_logits, target_weights

# Chance that the sibling of each rank is accepted, if those before it are rejected: 0.7, then 0.3
# of the one before. It shapes the trees that may not depend on probabilities.
FIRST_RANK = 0.7
NEXT_RANK = 0.3


@dataclass(frozen=True)
class Chosen:
    """Children of R nodes, K of each, best (or first drawn) first. Token ids are the target's."""

    tokens_RK: Tensor  # int64
    scores_RK: Tensor  # float32, log-probability given the parent
    weights_RV: Tensor | None = None  # what sampled ones were drawn from, as the target's tokens
    exists_RK: Tensor | None = None  # bool, False past the last token of any weight; None: all do


class DraftChoice:
    """How the drafts of one round are chosen, through the same logits pipeline as the target's
    tokens. Grammar masks belong to the target's rows and are not read.

    target_ids: int64 [Vd], the target's id of each token of the draft's vocabulary; None where they
    are the same. draws: requests that sample have their drafts sampled; all others, and all
    requests without it, get the best. by_rank: scores depend on the rank among siblings alone, as
    those of sampled drafts always do: a tree must not be shaped by what was drawn.

    Rows belong to requests in order, as many to each; `paths` are the tokens drafted above them.
    """

    def __init__(
        self,
        sampling: SamplingBatch,
        target_ids: Tensor | None,
        *,
        draws: bool = False,
        by_rank: bool = False,
    ) -> None:
        self.sampling = replace(sampling, mask=None)
        self.target_ids = target_ids
        self.random = sampling.random if draws else None
        self.by_rank = by_rank

    def best(self, logits_RV: Tensor, paths_RD: Tensor) -> Tensor:
        """int64 [R], the best token of each row."""
        if self.sampling.edits is not None:
            return self._edited(logits_RV, paths_RD).argmax(-1)
        return self._to_target(logits_RV.argmax(-1))

    def children(self, logits_RV: Tensor, paths_RD: Tensor, count: int, first_node: int) -> Chosen:
        """`count` children of each row. first_node: number of the first child of each request's
        first row; draws are keyed by these numbers and by output position."""
        if self.random is None:
            return self._best_children(logits_RV, paths_RD, count)
        rows = self._row_map(paths_RD)
        edited_RV = edit_logits(self._expand(logits_RV), self.sampling, rows)
        weights_RV = target_weights(edited_RV, self.random, rows)
        chosen = self._draw(weights_RV, rows, count, first_node)
        if self.random.any_greedy:
            best = self._rank(edited_RV, count)
            greedy_R1 = rows.per_row(self.random.greedy)[:, None]
            tokens_RK = torch.where(greedy_R1, best.tokens_RK, chosen.tokens_RK)
            scores_RK = torch.where(greedy_R1, best.scores_RK, chosen.scores_RK)
            assert chosen.exists_RK is not None
            exists_RK = chosen.exists_RK | greedy_R1
            chosen = Chosen(tokens_RK, scores_RK, weights_RV, exists_RK)
        return chosen

    def _best_children(self, logits_RV: Tensor, paths_RD: Tensor, count: int) -> Chosen:
        if self.sampling.edits is not None:
            return self._rank(self._edited(logits_RV, paths_RD), count)
        chosen = self._rank(logits_RV, count)
        return replace(chosen, tokens_RK=self._to_target(chosen.tokens_RK))

    def _rank(self, logits_RV: Tensor, count: int) -> Chosen:
        best = logits_RV.topk(count)
        if self.by_rank:
            return Chosen(best.indices, rank_scores(best.indices))
        scores_RK = best.values - logits_RV.logsumexp(-1, keepdim=True)
        return Chosen(best.indices, scores_RK.clamp(max=0.0))

    def _draw(self, weights_RV: Tensor, rows: RowMap, count: int, first_node: int) -> Chosen:
        """Without replacement, in the order drawn."""
        assert self.random is not None
        per_request = len(weights_RV) // self.sampling.batch_size
        row_R = torch.arange(len(weights_RV), device=weights_RV.device) % per_request
        lane_RK = first_node + row_R[:, None] * count + torch.arange(count, device=row_R.device)
        seeds_R, position_R = rows.per_row(self.random.seeds), rows.output_pos(self.sampling)
        seeds, position = (x.repeat_interleave(count) for x in (seeds_R, position_R))
        uniforms = draw(seeds, position, Stream.DRAFT, lane_RK.flatten())
        tokens_RK = draw_siblings(weights_RV, uniforms.view_as(lane_RK))
        exists_RK = tokens_RK >= 0
        return Chosen(tokens_RK.clamp(min=0), rank_scores(tokens_RK), weights_RV, exists_RK)

    def _edited(self, logits_RV: Tensor, paths_RD: Tensor) -> Tensor:
        return edit_logits(self._expand(logits_RV), self.sampling, self._row_map(paths_RD))

    def _expand(self, logits_RV: Tensor) -> Tensor:
        """[R, V] over the target's vocabulary; what the draft cannot say has minus infinity."""
        if self.target_ids is None:
            return logits_RV
        full_RV = logits_RV.new_full((len(logits_RV), self.sampling.vocab_size), float("-inf"))
        return full_RV.index_copy_(1, self.target_ids, logits_RV)

    def _to_target(self, tokens: Tensor) -> Tensor:
        return tokens if self.target_ids is None else self.target_ids[tokens]

    def _row_map(self, paths_RD: Tensor) -> RowMap:
        (num_rows, depth), device = paths_RD.shape, paths_RD.device
        request_R = torch.arange(num_rows, device=device) // (num_rows // self.sampling.batch_size)
        depth_R = torch.full((num_rows,), depth, device=device)
        path = PathTokens(paths_RD, torch.ones_like(paths_RD, dtype=torch.bool))
        return RowMap(request_R, depth_R, path)


def rank_scores(like_RK: Tensor) -> Tensor:
    """float32 [R, K], the same in every row."""
    ranks_K = torch.arange(like_RK.shape[1], device=like_RK.device)
    scores_K = math.log(FIRST_RANK) + ranks_K * math.log(NEXT_RANK)
    return scores_K.float().expand_as(like_RK)
