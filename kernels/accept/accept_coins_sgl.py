"""Acceptance of trees by coins, by sglang-kernel."""

from __future__ import annotations

import torch
from sgl_kernel import tree_speculative_sampling_target_only
from torch import Tensor

from specengine.kernels.tree.tree_build_sgl import links

_STEPS = 1 << 24  # of float32 between 0 and 1


def accept_coins(chances_BNN: Tensor, parents_BN: Tensor, uniforms_BN: Tensor) -> Tensor:
    batch_size, num_nodes = parents_BN.shape
    tree = links(parents_BN)
    # It accepts where the coin is at most the sum of chances; above 0, so that a chance of 0 never
    # wins.
    coins_BN = ((uniforms_BN * _STEPS).floor() + 1) / _STEPS
    nodes_N = torch.arange(num_nodes, device=parents_BN.device)
    chances = chances_BNN.float().contiguous()
    accepted_B = parents_BN.new_empty(batch_size, dtype=torch.int32)
    index_BN = parents_BN.new_zeros(batch_size, num_nodes, dtype=torch.int32)
    tree_speculative_sampling_target_only(
        parents_BN.new_empty(batch_size * num_nodes, dtype=torch.int32),
        index_BN,
        accepted_B,
        nodes_N.expand(batch_size, -1).contiguous(),
        tree.index_BN,
        tree.child_BN,
        tree.sibling_BN,
        coins_BN.float(),
        chances.new_zeros(batch_size),
        chances,
        torch.zeros_like(chances),
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
    )
    return index_BN.gather(1, accepted_B[:, None].long()).squeeze(1).long() % num_nodes
