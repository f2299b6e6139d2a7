"""Trees that are given by their parents, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.tree.tree_build_ref import climb
from specengine.kernels.tree.types import DraftTree


def tree_shape(roots_B: Tensor, nodes_B2M: Tensor, num_nodes: int, num_steps: int) -> DraftTree:
    tokens_BN = torch.cat([roots_B[:, None], nodes_B2M[:, 0, 1:num_nodes]], dim=1)
    return climb(tokens_BN, nodes_B2M[:, 1, :num_nodes].contiguous(), num_steps)
