"""Acceptance of chains by matching, and the state that the next round starts from."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels import accept_chain_ref
from specengine.kernels.dispatch import Backend, use_triton


def accept_chain(
    chosen_BN: Tensor,
    drafts_BK: Tensor,
    rows_B: Tensor,
    lens: Tensor,
    roots: Tensor,
    context: int,
    forced_B: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Count the drafts that the target chose too, and move each request on by them::

        for b in range(B):
            accepted = first k with drafts[b, k] != chosen[b, k], or K    # or forced[b]
            outcome[b] = (accepted, *chosen[b])
            if rows[b] != 0:
                lens[rows[b]] = min(lens[rows[b]] + accepted + 1, context - 1)
                roots[rows[b]] = chosen[b, accepted]

    chosen_BN: int64 [B, K + 1], the target's token at each node; drafts_BK: int64 [B, K], K may be
    0; rows_B: int64 [B], distinct but for 0, which pads; lens, roots: int64 [num_rows], modified;
    forced_B: int64 [B] in 0..K, how many to accept whatever was chosen. Gives outcome, int64
    [B, K + 2].
    """
    given = chosen_BN, drafts_BK, rows_B, lens, roots, context, forced_B
    if use_triton(backend, chosen_BN):
        from specengine.kernels import accept_chain_triton

        return accept_chain_triton.accept_chain(*given)
    return accept_chain_ref.accept_chain(*given)
