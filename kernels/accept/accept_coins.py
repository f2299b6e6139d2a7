"""Acceptance of trees by coins: each child of a node is accepted with its own chance."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.accept import accept_coins_ref
from specengine.kernels.dispatch import Backend


def accept_coins(
    chances_BNN: Tensor, parents_BN: Tensor, uniforms_BN: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """Walk from each root, with one coin a node, to the child that it falls on::

        for b in range(B):
            node = 0
            while uniforms[b, node] < sum(chances[b, node]):
                node = first child with uniforms[b, node] < chances[b, node, :child + 1].sum()
            ends[b] = node

    chances_BNN: float64, of the child (column) of a node (row), 0 where it is not its child; rows
    sum up to at most 1. parents_BN: int64, parents before children; uniforms_BN: float64 in [0, 1)
    -> ends, int64 [B]. Any device.

    As "sgl", sglang-kernel's tree_speculative_sampling_target_only does it, on CUDA: in float32,
    so that a coin within 2^-23 of a border may fall on its other side. Both of its thresholds are
    1, the only ones that keep the target's distribution, and its vocabulary is the tree's nodes:
    all that it asks of the target are the chances of children. The token that it draws in place of
    rejected ones is not taken: our coin for that depends on where the walk ends.
    """
    if backend == "sgl":
        from specengine.kernels.accept import accept_coins_sgl

        return accept_coins_sgl.accept_coins(chances_BNN, parents_BN, uniforms_BN)
    return accept_coins_ref.accept_coins(chances_BNN, uniforms_BN)
