"""One level of a draft tree's growth: the best children of each node, and the best of those."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.head.types import BlockPartials
from specengine.kernels.tree import tree_step_ref
from specengine.kernels.tree.types import Beams, Drawn, Found


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
        from specengine.kernels.tree import tree_step_triton

        return tree_step_triton.tree_step(*given, counters, ids, rank_scores, drawn)
    return tree_step_ref.tree_step(*given, ids, rank_scores, drawn)
