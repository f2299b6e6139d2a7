"""One level of a draft tree's growth: the best children of each node, and the best of those."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels import tree_step_ref
from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.head_topk import BlockPartials


@dataclass(frozen=True)
class Found:
    """Nodes found below the roots, level by level, siblings side by side and best first."""

    tokens_BC: Tensor  # int64
    scores_BC: Tensor  # float32, the logarithm of the path's probability, or what stands for it
    parents_BC: Tensor  # int64, index among the candidates; -1 is the root

    @classmethod
    def of(cls, batch_size: int, topk: int, num_steps: int, device: torch.device) -> Found:
        """Room for all that num_steps levels, at least 1, of topk branches find; uninitialised."""
        size = batch_size, topk + (num_steps - 1) * topk**2
        tokens = torch.empty(size, dtype=torch.int64, device=device)
        scores = torch.empty(size, dtype=torch.float32, device=device)
        return cls(tokens, scores, torch.empty_like(tokens))


@dataclass(frozen=True)
class Beams:
    """The K nodes of each request that are gone on with, best first."""

    tokens_BK: Tensor  # int64
    scores_BK: Tensor  # float32, of the whole path
    candidates_BK: Tensor  # int64, index among the nodes found
    above_T: Tensor  # int64 [B * K], the row of logits that each was found in
    depths_T: Tensor  # int64 [B * K], levels below the root's children
    mask_BKN: Tensor  # bool [B, K, M + K]: of the M beams of levels before, and these, its path


@dataclass(frozen=True)
class Drawn:
    """Children of each row that were drawn, for requests that want these and not the best."""

    tokens_TK: Tensor  # int64, of the target; -1 where there is none
    scores_K: Tensor  # float32, falling: they must not tell what was drawn
    greedy_B: Tensor  # bool, whose children are the best all the same


def tree_step(
    logits_TV: Tensor | BlockPartials,
    beams: Beams | None,
    found: Found,
    topk: int,
    counters: Tensor,
    ids: Tensor | None = None,
    rank_scores: Tensor | None = None,
    drawn: Drawn | None = None,
    *,
    backend: Backend = "auto",
) -> Beams:
    """Find the children of the beams, or with None those of the roots, and choose among them::

        for b in range(B):
            new = []
            for p, beam in enumerate(beams[b]):
                x = logits[b * P + p]
                for k, v in enumerate(topk(x, K)):
                    score = rank_scores[k] if given else min(x[v] - logsumexp(x), 0)
                    token = ids[v] if given else v
                    if drawn and not drawn.greedy[b]:
                        token, score = drawn.tokens[b * P + p, k], drawn.scores[k]
                    new.append((token, beam.score + score, beam.candidate))
            found[b, first : first + P * K] = new        # first: how many there were
            next_beams[b] = topk(new, K) by score

    The first among equals throughout (Li et al. 2024, arXiv:2406.16858: EAGLE-2's expansion).

    logits_TV: [B * P, V] float32, float16 or bfloat16, rows contiguous, no NaN, V at least K; or of
    such rows by block, with K best each. P is 1 for roots, else K. ids: int64 [V]; rank_scores:
    float32 [K], falling; counters: int32 [at least B], zeros before and after; calls that share
    them must not overlap. Any device; one Triton kernel on CUDA.
    """
    given = logits_TV, beams, found, topk
    if use_triton(backend, found.tokens_BC):
        from specengine.kernels import tree_step_triton

        return tree_step_triton.tree_step(*given, counters, ids, rank_scores, drawn)
    return tree_step_ref.tree_step(*given, ids, rank_scores, drawn)
