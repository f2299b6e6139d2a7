"""Trees that are given by their parents, as verification reads them."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.tree import tree_shape_ref
from specengine.kernels.tree.types import DraftTree


def tree_shape(
    roots_B: Tensor,
    nodes_B2M: Tensor,
    num_nodes: int,
    num_steps: int,
    *,
    backend: Backend = "auto",
) -> DraftTree:
    """The first N nodes of each tree::

        for b in range(B):
            tokens[b] = [roots[b], *nodes[b, 0, 1:N]]
            parents[b] = nodes[b, 1, :N]
            for n in range(N):
                path = [n, parents[b, n], ...] up to the root, or of num_steps + 1 nodes
                depths[b, n] = len(path) - 1
                mask[b, n, path] = True

    roots_B: int64 [B]. nodes_B2M: int64, the last axis contiguous; tokens and parents, no parent
    behind its child. The root's is -1; a node that is its own has num_steps as its depth, and sees
    itself alone. num_nodes: N, at least 2 and at most M. num_steps: no other node is deeper. Any
    device; one Triton kernel on CUDA.
    """
    if use_triton(backend, roots_B):
        from specengine.kernels.tree import tree_shape_triton

        return tree_shape_triton.tree_shape(roots_B, nodes_B2M, num_nodes, num_steps)
    return tree_shape_ref.tree_shape(roots_B, nodes_B2M, num_nodes, num_steps)
