"""The tree that goes to verification, out of all the nodes that were found."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.tree import tree_build_ref
from specengine.kernels.tree.types import DraftTree, Found, TreeLimits


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

    roots_B: int64 [B]. found: no child outdoes its parent, nor comes before it, so that parents of
    what is chosen are chosen; none is deeper than num_steps. num_nodes: N, at least 2, and no more
    than there are. limits: then found is as Found.of has it, and what is missing to N nodes has
    token 0, depth num_steps, and itself as its parent: no path comes by it. Any device; one Triton
    kernel on CUDA, or, as "sgl", which knows no limits, sglang-kernel's
    build_tree_kernel_efficient.
    """
    if backend == "sgl":
        from specengine.kernels.tree import tree_build_sgl

        if limits is not None:
            raise ValueError("sglang-kernel builds whole trees; leave `limits` out")
        return tree_build_sgl.tree_build(roots_B, found, num_nodes)
    if use_triton(backend, roots_B):
        from specengine.kernels.tree import tree_build_triton

        return tree_build_triton.tree_build(roots_B, found, num_nodes, num_steps, limits)
    return tree_build_ref.tree_build(roots_B, found, num_nodes, num_steps, limits)
