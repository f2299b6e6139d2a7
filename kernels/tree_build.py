"""The tree that goes to verification, out of all the nodes that were found."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels import tree_build_ref
from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.tree_step import Found


@dataclass(frozen=True)
class DraftTree:
    """N nodes a request, the root first, the others from the best to the worst: the first n are the
    tree of n nodes. No child stands before its parent."""

    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64, index among the nodes; the root's is -1
    depths_BN: Tensor  # int64, the root has 0
    mask_BNN: Tensor  # bool, True where node i (row) is node j (column) or below it

    @classmethod
    def unset(cls, batch_size: int, num_nodes: int, device: torch.device) -> DraftTree:
        """For a kernel to fill."""
        tokens_BN = torch.empty(batch_size, num_nodes, dtype=torch.int64, device=device)
        parents_BN, depths_BN = torch.empty_like(tokens_BN), torch.empty_like(tokens_BN)
        size = batch_size, num_nodes, num_nodes
        mask_BNN = torch.empty(size, dtype=torch.bool, device=device)
        return cls(tokens_BN, parents_BN, depths_BN, mask_BNN)


def tree_build(
    roots_B: Tensor, found: Found, num_nodes: int, num_steps: int, *, backend: Backend = "auto"
) -> DraftTree:
    """The root and the best of the others (EAGLE-2, Li et al. 2024, arXiv:2406.16858)::

        for b in range(B):
            chosen = topk(found.scores[b], N - 1)       # best first, of equals the first
            tokens[b] = [roots[b], *found.tokens[b, chosen]]
            node_of = {-1: 0, **{c: 1 + i for i, c in enumerate(chosen)}}
            parents[b] = [-1, *(node_of[found.parents[b, c]] for c in chosen)]
            for n in range(N):
                path = [n, parents[b, n], ...] up to the root
                depths[b, n] = len(path) - 1
                mask[b, n, path] = True

    roots_B: int64 [B]. found: no child outdoes its parent, nor stands before it, so that parents of
    what is chosen are chosen; none is deeper than num_steps. num_nodes: N, at least 2, and no more
    than there are. Any device; one Triton kernel on CUDA, or, as "sgl", sglang-kernel's
    build_tree_kernel_efficient.
    """
    if backend == "sgl":
        from specengine.kernels import tree_build_sgl

        return tree_build_sgl.tree_build(roots_B, found, num_nodes)
    if use_triton(backend, roots_B):
        from specengine.kernels import tree_build_triton

        return tree_build_triton.tree_build(roots_B, found, num_nodes, num_steps)
    return tree_build_ref.tree_build(roots_B, found, num_nodes, num_steps)
