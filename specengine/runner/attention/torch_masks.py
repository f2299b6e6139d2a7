"""Dense attention masks: Q queries of a request by K columns of its row of the page table."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_BQK(
    prefix_B: Tensor,
    columns_K: Tensor,
    depths_BQ: Tensor,
    tree_mask_BQN: Tensor | None,
    window: int | None,
    num_past: int = 0,
    chunk: int | None = None,
) -> Tensor:
    """Whether query i of a request sees a column of its page table::

        new = column - prefix                              # negative in the prefix
        seen = new < 0 or (tree_mask[i, new] if tree_mask else new <= i)
        if window: seen &= depth(new) > depths[i] - window     # depth(new) = new in the prefix
        if chunk: seen &= prefix + depth(new) and prefix + depths[i] lie in one chunk

    prefix_B: int64 [B], tokens before the tree; columns_K: int64 [K]; depths_BQ: int64 [B, Q],
    rotary position less prefix; tree_mask_BQN: bool [B, Q, num_past + N], N >= Q. The first
    num_past nodes are keys only; a window or chunk hides none of them. Returns bool [B, Q, K].
    """
    new_BK = columns_K - prefix_B[:, None]
    if tree_mask_BQN is None:
        order = torch.arange(depths_BQ.shape[1], device=columns_K.device)
        visible = new_BK[:, None] <= order[:, None]
        key_depth_BK = new_BK
    else:
        nodes = tree_mask_BQN.shape[2]
        node_BK = new_BK.clamp(0, nodes - 1)
        seen = tree_mask_BQN.gather(2, node_BK[:, None].expand(-1, depths_BQ.shape[1], -1))
        visible = (new_BK < 0)[:, None] | (seen & (new_BK < nodes)[:, None])
        query_BK = (node_BK - num_past).clamp(0, depths_BQ.shape[1] - 1)
        key_depth_BK = torch.where(new_BK < 0, new_BK, depths_BQ.gather(1, query_BK))
    back: int | Tensor | None = None if window is None else window - 1
    if chunk is not None:
        back = (depths_BQ + prefix_B[:, None]) % chunk
    if back is not None:
        is_past = (new_BK >= 0) & (new_BK < num_past)
        near = key_depth_BK[:, None] >= (depths_BQ - back)[..., None]
        visible = visible & (near | is_past[:, None])
    return visible


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, minus infinity elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))
