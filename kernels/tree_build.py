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
    # int64, of limited trees: which of the nodes found each is; 0 for the root and what is missing
    candidates_BN: Tensor | None = None

    @classmethod
    def unset(cls, batch_size: int, num_nodes: int, device: torch.device) -> DraftTree:
        """For a kernel to fill."""
        tokens_BN = torch.empty(batch_size, num_nodes, dtype=torch.int64, device=device)
        parents_BN, depths_BN = torch.empty_like(tokens_BN), torch.empty_like(tokens_BN)
        size = batch_size, num_nodes, num_nodes
        mask_BNN = torch.empty(size, dtype=torch.bool, device=device)
        return cls(tokens_BN, parents_BN, depths_BN, mask_BNN)


@dataclass(frozen=True)
class TreeLimits:
    """What each request may have of its tree.

    nodes_B: int64, the most nodes, root included, at least 1. What lies so many levels deep counts
    as never found: there are no paths of more nodes. depths_B: int64; of what was chosen, nodes
    that lie deeper are left out, and those behind them move up; so are those without a token (below
    0), whose children have none.
    """

    topk: int  # children found of each node that was gone on with
    nodes_B: Tensor
    depths_B: Tensor

    def found_within(self, depths_B: Tensor, candidates: int) -> Tensor:
        """int64 [B], how many of so many candidates lie no deeper; they are the first."""
        found_B = self.topk + (depths_B - 1) * self.topk**2
        return found_B.clamp(max=candidates).where(depths_B > 0, 0)


def tree_build(
    roots_B: Tensor,
    found: Found,
    num_nodes: int,
    num_steps: int,
    limits: TreeLimits | None = None,
    *,
    backend: Backend = "auto",
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
    than there are. limits: then found is as Found.of has it, and what is missing to N nodes has
    token 0, depth num_steps, and itself as its parent: no path comes by it. Any device; one Triton
    kernel on CUDA, or, as "sgl", which knows no limits, sglang-kernel's
    build_tree_kernel_efficient.
    """
    if backend == "sgl":
        from specengine.kernels import tree_build_sgl

        if limits is not None:
            raise ValueError("sglang-kernel builds whole trees; leave `limits` out")
        return tree_build_sgl.tree_build(roots_B, found, num_nodes)
    if use_triton(backend, roots_B):
        from specengine.kernels import tree_build_triton

        return tree_build_triton.tree_build(roots_B, found, num_nodes, num_steps, limits)
    return tree_build_ref.tree_build(roots_B, found, num_nodes, num_steps, limits)
