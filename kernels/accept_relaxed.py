"""Acceptance of drafts that are nearly as good as the target's own token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specengine.kernels import accept_relaxed_ref
from specengine.kernels.accept_sampled import Accepted
from specengine.kernels.dispatch import Backend, use_triton


@dataclass(frozen=True)
class RelaxedRound:
    """Drafts of one round, and what the target says after each node.

    The rows of a request's nodes lie together, from its root's on. Of nodes that do not exist
    tokens and parents are not read. Parents stand before children; the root's is not read. A node
    among those that exist whose token and parent are -1 is nobody's child, as if it did not.
    """

    logits_TV: Tensor  # floating, before temperature; -inf where a token is forbidden, no NaN
    chosen_T: Tensor  # int64, the target's token after each node
    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64
    counts_B: Tensor  # int64, nodes that exist, root included
    roots_B: Tensor  # int64, row of each root


def accept_relaxed(
    drafts: RelaxedRound, top_k: int, delta: float, *, backend: Backend = "auto"
) -> Accepted:
    """Walk from each root to the first child that carries the target's token, or else to the first
    that is fair after it, while there is one::

        for b in range(B):
            end = 0
            while a child of end carries chosen[end] or is fair:
                end = the first such child     # those that carry it before those that are fair
            token = chosen[end]

        fair(child) = prob(child) > 0
                      and fewer than top_k tokens have a larger logit
                      and prob(child) >= (the largest prob) - delta

    prob: of a token in the softmax of its parent's row, float64; delta: as a float32. This is how
    TensorRT-LLM relaxes acceptance for DeepSeek-R1, with the target's own token always fair.

    Any device. On CUDA in one launch of Triton, which sums over the vocabulary in another order:
    probs differ by some 2^-50 of themselves, and a decision only where one lies so near to its bar.
    Waits for nothing.
    """
    if use_triton(backend, drafts.logits_TV):
        from specengine.kernels import accept_relaxed_triton

        return accept_relaxed_triton.accept_relaxed(drafts, top_k, delta)
    return accept_relaxed_ref.accept_relaxed(drafts, top_k, delta)
