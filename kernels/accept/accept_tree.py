"""Acceptance of trees by matching, and the state that the next round starts from."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.accept import accept_tree_ref
from specengine.kernels.accept.types import AcceptedPaths, RoundState, Simulated
from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.tree.types import DraftTree


def accept_tree(
    state: RoundState,
    rows_B: Tensor,
    chosen_BN: Tensor,
    tree: DraftTree,
    num_steps: int,
    context: int,
    simulated: Simulated | None = None,
    *,
    backend: Backend = "auto",
) -> AcceptedPaths:
    """Walk from each root to the child that carries the target's token, while there is one, and
    move each request on by that::

        for b in range(B):
            path = [0]
            while a child of path[-1] has tokens[b, child] == chosen[b, path[-1]]:
                path.append(the first such child)      # simulated: the first child, so often
            path = path[:max_accepted[rows[b]] + 1]
            emitted[b] = chosen[b, path]
            outcomes[turn, b] = (len(path) - 1, *emitted[b], *path[1:])   # of W and W - 1 places
            if rows[b] != 0:
                lens[rows[b]] = min(lens[rows[b]] + len(path), context - 1)
                roots[rows[b]] = emitted[b, -1]

    chosen_BN: int64, the target's token at each node; rows_B: int64 [B], distinct but for 0;
    num_steps: no node is deeper, and W is one more. Any device; one Triton kernel on CUDA, or, as
    "sgl", sglang-kernel's verify_tree_greedy, which simulates nothing.
    """
    if backend == "sgl":
        from specengine.kernels.accept import accept_tree_sgl

        if simulated is not None:
            raise ValueError("sglang-kernel walks by tokens alone; leave `simulated` out")
        return accept_tree_sgl.accept_tree(state, rows_B, chosen_BN, tree, num_steps, context)
    given = state, rows_B, chosen_BN, tree, num_steps, context, simulated
    if use_triton(backend, chosen_BN):
        from specengine.kernels.accept import accept_tree_triton

        return accept_tree_triton.accept_tree(*given)
    return accept_tree_ref.accept_tree(*given)
