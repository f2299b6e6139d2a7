"""Paths of trees that a rule has decided on, and the state that the next round starts from."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.accept import accept_path_ref
from specengine.kernels.accept.types import Accepted, AcceptedPaths, RoundState
from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.tree.types import DraftTree


def accept_path(
    state: RoundState,
    rows_B: Tensor,
    found: Accepted,
    tree: DraftTree,
    num_steps: int,
    context: int,
    *,
    backend: Backend = "auto",
) -> AcceptedPaths:
    """Move each request on by its accepted path::

        for b in range(B):
            path = [0, .., parents[b, ends[b]], ends[b]]
            emitted[b] = (*tokens[b, path[1:]], found.tokens[b])
            drafted = nodes of tree b but the root that are not their own parents
            outcomes[turn, b] = (len(path) - 1, *emitted[b], *path[1:], drafted)
                                                       # of 1, W, W - 1 places and 1
            if rows[b] != 0:
                lens[rows[b]] = min(lens[rows[b]] + len(path), context - 1)
                roots[rows[b]] = emitted[b, -1]

    The token behind a path may be that of a child of its end, which means nothing: no tokens
    are compared. rows_B: int64 [B], distinct but for 0; num_steps: no node is deeper, and W is one
    more. Past a path it is the root again, and its token. Any device; one Triton kernel on CUDA.
    """
    given = state, rows_B, found, tree, num_steps, context
    if use_triton(backend, rows_B):
        from specengine.kernels.accept import accept_path_triton

        return accept_path_triton.accept_path(*given)
    return accept_path_ref.accept_path(*given)
